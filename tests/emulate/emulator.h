// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// One thread block, or the blocks of a cluster, as fibers of one OS thread. A
// fiber runs until it has to wait; who runs next, and when asynchronous copies
// arrive, is the seed's choice.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

namespace emu {

// Shared memory of block r of a cluster is the window of addresses
// [windows + r * kWindowBytes, + kWindowBytes), so that a 32-bit shared address
// is a pointer, and its low 18 bits are what a wgmma descriptor holds.
extern uint32_t windows;
constexpr uint32_t kWindowBytes = 1u << 18;
constexpr int kMaxCluster = 8;
constexpr size_t kPage = 4096;
constexpr uint8_t kPoison = 0xff;  // NaN in every type, -1, an invalid code

struct Block;
struct Warp;

struct AsyncCopy {  // cp.async
  uint32_t dst;
  const uint8_t* src;
  unsigned group;
};
struct BulkStore {  // from shared memory; reads it when it runs
  std::function<void()> run;
  bool done = false;
  unsigned group = 0;
};

// One wgmma of one thread, until it has been waited for.
struct Wgmma {
  const uint32_t* a[4];  // the registers, which must keep their values
  uint32_t a_values[4];
  uint64_t descriptor;
  bool add;
  int kind, n;  // kind: 0 float16, 1 bfloat16, 2 int8
  void* d;      // the first register
  unsigned group;
  bool done;
};
struct Accumulator {  // registers that a wgmma writes
  std::vector<uint32_t*> registers;
  std::vector<uint32_t> values;
  int pending = 0;
};

struct Fiber {
  jmp_buf context;
  ucontext_t first;
  bool started = false, ended = false, blocked = false;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int thread = 0, lane = 0;
  uint3 index{};
  std::string waits_for;

  std::vector<AsyncCopy> copies;
  unsigned copy_group = 0;
  std::vector<std::shared_ptr<BulkStore>> stores;
  unsigned store_group = 0;
  std::vector<Wgmma> wgmmas;
  std::map<void*, Accumulator> accumulators;
  unsigned wgmma_group = 0;
  bool wgmma_fenced = false;
  unsigned proxy_fences = 0;
  bool cluster_arrived = false;
  unsigned cluster_phase = 0;
};

struct Meeting {
  uint32_t mask, here = 0;
  const char* what;
  void* arguments[32];
};

struct Warp {
  std::vector<Fiber*> lanes;
  uint32_t runnable = 0;
  int active_at = -1;  // place in the list of warps that can run, or -1
  uint32_t priority = 0;
  std::vector<Meeting> meetings;
};

struct NamedBarrier {
  int arrived = 0, expected = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  uint3 index{};
  int rank = 0, live = 0;
  bool ended = false;
  uint8_t* dynamic = nullptr;
  uint32_t dynamic_bytes = 0;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier barriers[16];
  std::map<const void*, void*> statics;
  uint32_t statics_used = 0;
  // Of each 16 bytes of the window: who wrote them by ordinary stores, and how
  // often that thread had fenced them against the copy engine by then.
  std::vector<std::pair<Fiber*, unsigned>> written;
};

struct Cluster {
  std::vector<Block> blocks;
  int live = 0, arrived = 0;
  unsigned phase = 0;
  std::vector<Fiber*> waiting;
};

// How a launch is scheduled, drawn from the seed.
struct Mood {
  enum Order { kInTurn, kRandom, kPriority } order;
  enum Delay { kSoon, kAnyTime, kLate } delay;  // of asynchronous copies
  bool copies_at_once;  // cp.async at issue, else when waited for
  bool wgmma_at_commit;
  int lane_step;                    // 31: backwards
  int yield_one_in, change_one_in;  // of a priority
  int late;                         // block of a cluster, or -1
};

extern Fiber* current;
extern Cluster* cluster;
extern Mood mood;
extern std::mt19937 rng;

inline bool one_in(int n) { return rng() % unsigned(n) == 0; }

inline size_t round_up(size_t v, size_t to) { return (v + to - 1) / to * to; }

// Runs a grid; returns what went wrong, or nothing.
std::string run(const cudaLaunchConfig_t& config, unsigned cluster_size,
                bool dependent, unsigned seed, void (*thread)(const void*),
                const void* argument);
// Buffers out of reach until the kernel before has ended: whether there are
// any.
bool protect_withheld();
void release_withheld();
// Where in a buffer an address is.
std::string describe(const uint8_t* address);

// Stops the running fiber until wake().
void wait(const char* what);
void wake(Fiber* fiber);
// Lets others run, now and then.
void maybe_yield();
// Runs `action` some time later, on nobody's stack.
void later(std::function<void()> action);

// Bytes of shared memory of this cluster, checked.
uint8_t* shared(uint32_t address, uint32_t bytes, uint32_t align);
Block& block_at(uint32_t address);
void ordinary_write(uint32_t address, uint32_t bytes);
void check_fenced(uint32_t address, uint32_t bytes);
void grid_dependency_wait();

void bar(int id, int count, bool stay);
void cluster_arrive();
void cluster_wait();
void on_exit(Fiber& fiber);  // barriers that it no longer holds up

void barrier_init(uint32_t address, int count);
void barrier_arrive(uint32_t address, int count);
void barrier_expect(uint32_t address, uint32_t bytes);
void barrier_bytes(uint32_t address, uint32_t bytes);
bool barrier_done(uint32_t address, uint32_t parity);
void barrier_wait(uint32_t address);  // until it changes its phase
void forget_barriers();

void finish_copies(Fiber& fiber, unsigned groups_before);
void issue_wgmma(const Wgmma& op, uint32_t* const* registers);
void commit_wgmma();
void wait_wgmma(int pending);

}  // namespace emu

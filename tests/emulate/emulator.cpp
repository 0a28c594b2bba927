// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Fibers and their scheduler.
#include "emulator.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <queue>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {

uint32_t windows = 0;
Fiber* current = nullptr;
Cluster* cluster = nullptr;
Mood mood;
std::mt19937 rng;

namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kStaticBytes = 4 * kPage;  // of static shared memory
constexpr int kMaxThreads = kMaxCluster * 1024;

std::string error;
bool dependency_over = true;
std::vector<Fiber*> dependents;

jmp_buf scheduler;
sigjmp_buf abandon;
bool running = false;
uint8_t* stacks = nullptr;
std::vector<Warp*> active;
uint64_t now = 0, sequence = 0;
size_t turn = 0;
void (*thread_body)(const void*) = nullptr;
const void* thread_argument = nullptr;

void end_dependency() {
  release_withheld();
  dependency_over = true;
  for (Fiber* f : dependents) wake(f);
  dependents.clear();
}

struct Event {
  uint64_t due, order;
  std::function<void()> action;
  bool operator>(const Event& o) const {
    return due != o.due ? due > o.due : order > o.order;
  }
};
std::priority_queue<Event, std::vector<Event>, std::greater<>> events;

void run_event() {
  const std::function<void()> action = events.top().action;
  events.pop();
  current = nullptr;
  action();
}

std::string place(const Fiber& f) {
  char text[160];
  snprintf(text, sizeof text, "block (%u, %u, %u) thread %d", f.block->index.x,
           f.block->index.y, f.block->index.z, f.thread);
  return text;
}

__attribute__((noinline)) void to_scheduler() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void fiber_main() {
  thread_body(thread_argument);
  Fiber& f = *current;
  f.ended = true;
  finish_copies(f, ~0u);
  if (!f.wgmmas.empty()) fail("ends before its wgmma");
  on_exit(f);
  f.warp->runnable &= ~(1u << f.lane);
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& f) {
  current = &f;
  threadIdx = f.index;
  blockIdx = f.block->index;
  if (_setjmp(scheduler)) return;
  if (f.started) _longjmp(f.context, 1);
  f.started = true;
  setcontext(&f.first);
}

void activate(Warp& w) {
  if (w.active_at >= 0) return;
  w.active_at = int(active.size());
  active.push_back(&w);
}

void deactivate(Warp& w) {
  active[w.active_at] = active.back();
  active[w.active_at]->active_at = w.active_at;
  active.pop_back();
  w.active_at = -1;
}

// One block of a cluster may be late: its warps go on when no other can.
uint32_t draw_priority(int rank) {
  return rng() >> 1 | (rank == mood.late ? 0 : 1u << 31);
}

Warp& pick() {
  if (mood.order == Mood::kInTurn) return *active[turn++ % active.size()];
  if (mood.order == Mood::kRandom) return *active[rng() % active.size()];
  Warp* best = active[0];
  for (Warp* w : active) {
    if (w->priority > best->priority) best = w;
  }
  if (one_in(mood.change_one_in)) {
    best->priority = draw_priority(best->lanes[0]->block->rank);
  }
  return *best;
}

void run_warp(Warp& w) {
  const uint32_t ready = w.runnable;
  const int first = int(rng() & 31);
  for (int i = 0; i < 32; ++i) {
    const int lane = (first + i * mood.lane_step) & 31;
    if (ready >> lane & w.runnable >> lane & 1) resume(*w.lanes[lane]);
  }
  if (!w.runnable) deactivate(w);
}

void deadlock() {
  std::string text = "nothing can run any more:";
  std::map<std::string, std::pair<int, std::string>> waits;
  for (Block& b : cluster->blocks) {
    for (auto& f : b.fibers) {
      if (f->ended) continue;
      auto& w = waits[f->waits_for];
      if (!w.first++) w.second = place(*f);
    }
  }
  for (auto& [what, w] : waits) {
    text += "\n  " + std::to_string(w.first) + " threads in " + what +
            ", the first " + w.second;
  }
  current = nullptr;
  fail("%s", text.c_str());
}

void run_cluster() {
  while (cluster->live > 0) {
    if (active.empty()) {
      if (!events.empty()) {
        run_event();
      } else if (!dependents.empty()) {
        end_dependency();
      } else {
        deadlock();
      }
      continue;
    }
    run_warp(pick());
    ++now;
    while (!events.empty() && events.top().due <= now) run_event();
    const bool early = mood.delay == Mood::kSoon || mood.late >= 0;
    if (!dependents.empty() && early && one_in(20)) {
      end_dependency();
    }
  }
  while (!events.empty()) run_event();
}

// The stack of a thread, above a page without access. Only those in use have
// one: a process may have no more than some ten thousand mappings.
uint8_t* stack_of(int thread) {
  static bool guarded[kMaxThreads];
  uint8_t* const page = stacks + size_t(thread) * kStackBytes;
  if (!guarded[thread]) mprotect(page, kPage, PROT_NONE);
  guarded[thread] = true;
  return page + kPage;
}

void set_up(Block& b, const cudaLaunchConfig_t& c) {
  uint8_t* window = reinterpret_cast<uint8_t*>(
      uintptr_t(windows + uint32_t(b.rank) * kWindowBytes));
  // Static shared memory below, dynamic up to the end of a page.
  const size_t bytes = round_up(c.dynamicSmemBytes, 128);
  uint8_t* end = window + kWindowBytes - kPage;
  mprotect(window, kWindowBytes, PROT_NONE);
  uint8_t* from = end - round_up(bytes + 1, kPage);
  mprotect(from, size_t(end - from), PROT_READ | PROT_WRITE);
  mprotect(window + kPage, kStaticBytes, PROT_READ | PROT_WRITE);
  memset(from, kPoison, size_t(end - from));
  memset(window + kPage, kPoison, kStaticBytes);
  b.dynamic = end - bytes;
  b.dynamic_bytes = uint32_t(c.dynamicSmemBytes);
  const int threads = int(c.blockDim.x * c.blockDim.y * c.blockDim.z);
  b.live = threads;
  for (int t = 0; t < threads; ++t) {
    if (t % 32 == 0) {
      b.warps.push_back(std::make_unique<Warp>());
      b.warps.back()->priority = draw_priority(b.rank);
    }
    auto f = std::make_unique<Fiber>();
    f->block = &b;
    f->warp = b.warps.back().get();
    f->thread = t;
    f->lane = t % 32;
    f->index = {unsigned(t) % c.blockDim.x, unsigned(t) / c.blockDim.x, 0};
    getcontext(&f->first);
    f->first.uc_stack.ss_sp = stack_of(b.rank * 1024 + t);
    f->first.uc_stack.ss_size = kStackBytes - kPage;
    f->first.uc_link = nullptr;
    makecontext(&f->first, fiber_main, 0);
    f->warp->lanes.push_back(f.get());
    f->warp->runnable |= 1u << f->lane;
    b.fibers.push_back(std::move(f));
  }
  for (auto& w : b.warps) activate(*w);
}

void draw_mood(unsigned seed) {
  rng.seed(seed);
  mood.order = Mood::Order(rng() % 3);
  mood.delay = Mood::Delay(rng() % 3);
  mood.copies_at_once = rng() % 2;
  mood.wgmma_at_commit = rng() % 2;
  mood.lane_step = rng() % 2 ? 1 : 31;
  mood.yield_one_in = rng() % 2 ? 16 : 1 << 30;
  mood.change_one_in = rng() % 2 ? 50 : 2000;
  mood.late = int(rng() % 4) - 1;
}

void run_grid(const cudaLaunchConfig_t& c, unsigned size) {
  const unsigned count = c.gridDim.x * c.gridDim.y * c.gridDim.z;
  for (unsigned first = 0; first < count; first += size) {
    Cluster here;
    here.blocks = std::vector<Block>(size);
    cluster = &here;
    active.clear();
    forget_barriers();
    for (unsigned r = 0; r < size; ++r) {
      Block& b = here.blocks[r];
      const unsigned i = first + r;
      b.index = {i % c.gridDim.x, i / c.gridDim.x % c.gridDim.y,
                 i / c.gridDim.x / c.gridDim.y};
      b.rank = int(r);
      set_up(b, c);
      here.live += b.live;
    }
    run_cluster();
    for (Block& b : here.blocks) {
      const size_t bytes = round_up(b.dynamic_bytes, 128);
      for (size_t i = b.dynamic_bytes; i < bytes; ++i) {
        if (b.dynamic[i] != kPoison) fail("writes behind its shared memory");
      }
    }
    cluster = nullptr;
  }
}

void on_fault(int signal_number, siginfo_t* info, void*) {
  const auto* at = static_cast<const uint8_t*>(info->si_addr);
  if (!running) {
    signal(signal_number, SIG_DFL);
    return;
  }
  if (signal_number == SIGILL) {
    fail("misaligned vector, or an index beyond its array");
  }
  std::string where = describe(at);
  if (at >= reinterpret_cast<uint8_t*>(windows) &&
      at < reinterpret_cast<uint8_t*>(windows + kMaxCluster * kWindowBytes)) {
    where = "outside of shared memory";
  }
  char text[240];
  snprintf(text, sizeof text, "faults at %p, %s", info->si_addr, where.c_str());
  error = (current ? place(*current) + ": " : std::string()) + text;
  siglongjmp(abandon, 1);
}

void prepare() {
  if (stacks) return;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  stacks = static_cast<uint8_t*>(mmap(nullptr, kMaxThreads * kStackBytes,
                                      PROT_READ | PROT_WRITE, flags, -1, 0));
  // Below 4 GiB; each library of a process finds a place of its own.
  for (uint32_t at = 0x20000000u; at < 0x60000000u; at += 0x1000000u) {
    void* place = reinterpret_cast<void*>(uintptr_t(at));
    void* found = mmap(place, kMaxCluster * kWindowBytes, PROT_NONE,
                       flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (found == place) {
      windows = at;
      break;
    }
    if (found != MAP_FAILED) munmap(found, kMaxCluster * kWindowBytes);
  }
  if (!windows) fail("no room for shared memory below 4 GiB");
  static uint8_t alternate[1 << 16];
  const stack_t stack = {alternate, 0, sizeof alternate};
  sigaltstack(&stack, nullptr);
}

}  // namespace

void fail(const char* format, ...) {
  char text[4000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  error = (current ? place(*current) + ": " : std::string()) + text;
  if (!running) {
    fprintf(stderr, "emulator: %s\n", error.c_str());
    abort();
  }
  siglongjmp(abandon, 1);
}

int lane() { return current->lane; }
uint8_t* block_dynamic() { return current->block->dynamic; }

void* block_static(const void* key, size_t bytes, size_t align) {
  Block& b = *current->block;
  auto [it, is_new] = b.statics.try_emplace(key, nullptr);
  if (is_new) {
    b.statics_used = uint32_t(round_up(b.statics_used, align));
    it->second = reinterpret_cast<uint8_t*>(
        uintptr_t(windows + b.rank * kWindowBytes + kPage + b.statics_used));
    b.statics_used += uint32_t(bytes);
    if (b.statics_used > kStaticBytes) fail("too much static shared memory");
  }
  return it->second;
}

void wait(const char* what) {
  Fiber& f = *current;
  f.blocked = true;
  f.waits_for = what;
  f.warp->runnable &= ~(1u << f.lane);
  to_scheduler();
}

void wake(Fiber* f) {
  if (!f->blocked) return;
  f->blocked = false;
  f->warp->runnable |= 1u << f->lane;
  activate(*f->warp);
}

void maybe_yield() {
  if (one_in(mood.yield_one_in)) to_scheduler();
}

void later(std::function<void()> action) {
  uint64_t due = now;
  if (mood.delay == Mood::kSoon) due += rng() % 4;
  if (mood.delay == Mood::kAnyTime) due += rng() % (1u << (rng() % 12));
  if (mood.delay == Mood::kLate) due += (1u << 20) + rng() % (1 << 16);
  events.push({due, sequence++, std::move(action)});
}

void grid_dependency_wait() {
  if (dependency_over) return;
  dependents.push_back(current);
  wait("griddepcontrol.wait");
}

std::string run(const cudaLaunchConfig_t& c, unsigned size, bool dependent,
                unsigned seed, void (*thread)(const void*),
                const void* argument) {
  prepare();
  error.clear();
  blockDim = c.blockDim;
  gridDim = c.gridDim;
  thread_body = thread;
  thread_argument = argument;
  draw_mood(seed);
  while (!events.empty()) events.pop();
  now = 0;
  current = nullptr;
  struct sigaction action = {}, before, before_ill;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
  sigaction(SIGILL, &action, &before_ill);
  running = true;
  dependency_over = !(dependent && protect_withheld());
  // C++ objects on the fibers' stacks are lost when a launch is abandoned.
  if (!sigsetjmp(abandon, 1)) {
    run_grid(c, size);
  } else {
    cluster = nullptr;
  }
  current = nullptr;
  running = false;
  dependents.clear();
  end_dependency();
  sigaction(SIGSEGV, &before, nullptr);
  sigaction(SIGILL, &before_ill, nullptr);
  return error;
}

}  // namespace emu

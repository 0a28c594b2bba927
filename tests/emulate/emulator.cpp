// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Devices, memory with guard pages, fibers and their scheduler.
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

constexpr size_t kStackBytes = 128 << 10, kPage = 4096;
constexpr size_t kStaticBytes = 4 * kPage;  // of static shared memory
constexpr int kMaxThreads = kMaxCluster * 1024;

struct Device {
  int capability, processors, shared_memory;
};
// An H200, the same with few multiprocessors (so that small products take
// several turns), an A100, an L40S.
constexpr Device kDevices[] = {
    {90, 132, 227 << 10}, {90, 3, 227 << 10},  {90, 8, 227 << 10},
    {80, 108, 163 << 10}, {89, 142, 99 << 10},
};

std::string error;
unsigned seed = 0, launches = 0;
int device = 0;
// Dynamic shared memory of a kernel on a device.
std::map<std::pair<const void*, int>, int> allowed;

// --- Memory

struct Buffer {
  uint8_t *base, *data;
  size_t mapped, bytes;
};
std::map<uint8_t*, Buffer> buffers;
std::vector<uint8_t*> withheld;  // until the kernel before has ended
bool dependency_over = true;
std::vector<Fiber*> dependents;

size_t round_up(size_t v, size_t to) { return (v + to - 1) / to * to; }

void protect(const Buffer& b, int how) {
  mprotect(b.base + kPage, b.mapped - 2 * kPage, how);
}

void release_withheld() {
  for (uint8_t* p : withheld) protect(buffers.at(p), PROT_READ | PROT_WRITE);
  withheld.clear();
  dependency_over = true;
  for (Fiber* f : dependents) wake(f);
  dependents.clear();
}

// --- Scheduler

jmp_buf scheduler;
sigjmp_buf abandon;
bool running = false;
uint8_t* stacks = nullptr;
std::vector<Warp*> active;
uint64_t now = 0, sequence = 0;
size_t turn = 0;
void (*thread_body)(const void*) = nullptr;
const void* thread_argument = nullptr;

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

Warp& pick() {
  if (mood.order == Mood::kInTurn) return *active[turn++ % active.size()];
  if (mood.order == Mood::kRandom) return *active[rng() % active.size()];
  Warp* best = active[0];
  for (Warp* w : active) {
    if (w->priority > best->priority) best = w;
  }
  if (one_in(150)) best->priority = rng();
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
        release_withheld();
      } else {
        deadlock();
      }
      continue;
    }
    run_warp(pick());
    ++now;
    while (!events.empty() && events.top().due <= now) run_event();
    if (!dependents.empty() && mood.delay == Mood::kSoon && one_in(20)) {
      release_withheld();
    }
  }
  while (!events.empty()) run_event();
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
      b.warps.back()->priority = rng();
    }
    auto f = std::make_unique<Fiber>();
    f->block = &b;
    f->warp = b.warps.back().get();
    f->thread = t;
    f->lane = t % 32;
    f->index = {unsigned(t) % c.blockDim.x, unsigned(t) / c.blockDim.x, 0};
    getcontext(&f->first);
    f->first.uc_stack.ss_sp =
        stacks + size_t(b.rank * 1024 + t) * kStackBytes + kPage;
    f->first.uc_stack.ss_size = kStackBytes - kPage;
    f->first.uc_link = nullptr;
    makecontext(&f->first, fiber_main, 0);
    f->warp->lanes.push_back(f.get());
    f->warp->runnable |= 1u << f->lane;
    b.fibers.push_back(std::move(f));
  }
  for (auto& w : b.warps) activate(*w);
}

void draw_mood() {
  rng.seed(seed * 7919u + launches);
  mood.order = Mood::Order(rng() % 3);
  mood.delay = Mood::Delay(rng() % 3);
  mood.copies_at_once = rng() % 2;
  mood.wgmma_at_commit = rng() % 2;
  mood.lane_step = rng() % 2 ? 1 : 31;
  mood.yield_one_in = rng() % 2 ? 16 : 1 << 30;
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

void on_fault(int, siginfo_t* info, void*) {
  const auto* at = static_cast<const uint8_t*>(info->si_addr);
  if (!running) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  char where[120] = "";
  for (auto& [data, b] : buffers) {
    if (at >= b.base && at < b.base + b.mapped) {
      snprintf(where, sizeof where, ", byte %td of a buffer of %zu", at - data,
               b.bytes);
    }
  }
  if (at >= reinterpret_cast<uint8_t*>(windows) &&
      at < reinterpret_cast<uint8_t*>(windows + kMaxCluster * kWindowBytes)) {
    snprintf(where, sizeof where, ", outside of shared memory");
  }
  char text[240];
  snprintf(text, sizeof text, "faults at %p%s", info->si_addr, where);
  error = (current ? place(*current) + ": " : std::string()) + text;
  siglongjmp(abandon, 1);
}

void prepare() {
  if (stacks) return;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  stacks = static_cast<uint8_t*>(mmap(nullptr, kMaxThreads * kStackBytes,
                                      PROT_READ | PROT_WRITE, flags, -1, 0));
  for (int i = 0; i < kMaxThreads; ++i) {
    mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
  }
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

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes > kDevices[device].shared_memory) return cudaErrorInvalidValue;
  allowed[{kernel, device}] = bytes;
  return cudaSuccess;
}

int active_clusters(const cudaLaunchConfig_t& c) {
  const int blocks = c.dynamicSmemBytes <= 113 << 10 ? 2 : 1;
  unsigned size = 1;
  for (unsigned i = 0; i < c.numAttrs; ++i) {
    if (c.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      size = c.attrs[i].val.clusterDim.x;
    }
  }
  return kDevices[device].processors * blocks / int(size);
}

cudaError_t launch(const cudaLaunchConfig_t& c, const void* kernel,
                   void (*thread)(const void*), const void* argument) {
  prepare();
  unsigned size = 1;
  bool dependent = false;
  for (unsigned i = 0; i < c.numAttrs; ++i) {
    const auto& a = c.attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) size = a.val.clusterDim.x;
    dependent |= a.id == cudaLaunchAttributeProgrammaticStreamSerialization;
  }
  const unsigned threads = c.blockDim.x * c.blockDim.y * c.blockDim.z;
  const auto limit = allowed.find({kernel, device});
  const size_t most = limit == allowed.end() ? 48 << 10 : limit->second;
  error.clear();
  if (threads < 1 || threads > 1024 || size < 1 || size > kMaxCluster ||
      c.gridDim.x % size || c.gridDim.x < 1 || c.gridDim.y < 1 ||
      c.gridDim.z < 1 || c.gridDim.y > 65535 || c.gridDim.z > 65535 ||
      c.dynamicSmemBytes > most || threads % 32 ||
      ((size > 1 || dependent) && kDevices[device].capability < 90)) {
    error = "invalid launch";
    return cudaErrorInvalidValue;
  }
  blockDim = c.blockDim;
  gridDim = c.gridDim;
  thread_body = thread;
  thread_argument = argument;
  ++launches;
  draw_mood();
  while (!events.empty()) events.pop();
  now = 0;
  current = nullptr;
  struct sigaction action = {}, before;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
  running = true;
  dependency_over = !dependent || withheld.empty();
  if (!dependency_over) {
    for (uint8_t* p : withheld) protect(buffers.at(p), PROT_NONE);
  }
  // C++ objects on the fibers' stacks are lost when a launch is abandoned.
  if (!sigsetjmp(abandon, 1)) {
    run_grid(c, size);
  } else {
    cluster = nullptr;
  }
  current = nullptr;
  running = false;
  dependents.clear();
  release_withheld();
  sigaction(SIGSEGV, &before, nullptr);
  return error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace emu

// --- Runtime

const char* cudaGetErrorString(cudaError_t) { return emu::error.c_str(); }
cudaError_t cudaGetLastError() {
  return emu::error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what,
                                   int device) {
  const emu::Device& d = emu::kDevices[device];
  switch (what) {
    case cudaDevAttrMultiProcessorCount:
      *value = d.processors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = d.capability % 10;
      break;
    default:
      *value = d.shared_memory;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- For the tests

#pragma GCC visibility push(default)
extern "C" {

// `bytes` that end where a page without access begins, as far as 16-byte
// alignment allows; another such page is in front.
void* emu_alloc(size_t bytes) {
  using namespace emu;
  const size_t size = round_up(bytes, 16);
  Buffer b{};
  b.mapped = round_up(size + 1, kPage) + 2 * kPage;
  b.base = static_cast<uint8_t*>(mmap(nullptr, b.mapped, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  b.data = b.base + b.mapped - kPage - size;
  b.bytes = bytes;
  memset(b.base, kPoison, b.mapped - kPage);
  mprotect(b.base, kPage, PROT_NONE);
  mprotect(b.base + b.mapped - kPage, kPage, PROT_NONE);
  buffers[b.data] = b;
  return b.data;
}

// Frees; false where the bytes around the buffer were written.
bool emu_free(void* data) {
  using namespace emu;
  const Buffer b = buffers.at(static_cast<uint8_t*>(data));
  bool good = true;
  for (uint8_t* p = b.base + kPage; p < b.base + b.mapped - kPage; ++p) {
    if ((p < b.data || p >= b.data + b.bytes) && *p != kPoison) good = false;
  }
  munmap(b.base, b.mapped);
  buffers.erase(b.data);
  return good;
}

void emu_begin(unsigned seed, int device) {
  emu::seed = seed;
  emu::device = device;
  emu::launches = 0;
}

// The next launch may touch the buffer only once it has waited for the kernel
// ahead of it in the stream.
void emu_withhold(void* data) {
  emu::withheld.push_back(static_cast<uint8_t*>(data));
}
}

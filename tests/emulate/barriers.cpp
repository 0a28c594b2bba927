// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What threads wait for: each other (warps, named barriers, the cluster),
// mbarriers in shared memory, their own asynchronous copies.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "emulator.h"

namespace emu {
namespace {

// An mbarrier as it lies in shared memory, so that overwriting it shows.
struct Mbarrier {
  uint32_t tag : 8, phase : 1, expected : 12, spare : 11;
  int32_t pending : 12, bytes : 20;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint32_t kTag = 0x5b;

std::unordered_map<uint32_t, std::vector<Fiber*>> waiting;

Mbarrier& mbarrier(uint32_t address) {
  auto& b = *reinterpret_cast<Mbarrier*>(shared(address, 8, 8));
  if (b.tag != kTag) fail("no mbarrier at %#x", address);
  return b;
}

void check_phase(uint32_t address, Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = int(b.expected);
  auto it = waiting.find(address);
  if (it == waiting.end()) return;
  for (Fiber* f : it->second) wake(f);
  it->second.clear();
}

void check_cluster() {
  Cluster& c = *cluster;
  if (c.arrived < c.live || c.arrived == 0) return;
  c.arrived = 0;
  ++c.phase;
  for (Fiber* f : c.waiting) wake(f);
  c.waiting.clear();
}

void check_block(Block& b) {  // __syncthreads: all that have not left
  NamedBarrier& n = b.barriers[0];
  if (n.arrived < b.live || n.arrived == 0) return;
  n.arrived = 0;
  for (Fiber* f : n.waiting) wake(f);
  n.waiting.clear();
}

}  // namespace

void forget_barriers() { waiting.clear(); }

void meet(uint32_t mask, const char* what, void* mine,
          void (*body)(void* const* lanes, uint32_t mask)) {
  Fiber& f = *current;
  Warp& w = *f.warp;
  const uint32_t bit = 1u << f.lane;
  if (!(mask & bit)) fail("%s with a mask that lacks its own lane", what);
  size_t i = 0;
  while (i < w.meetings.size() && !(w.meetings[i].mask & mask)) ++i;
  if (i == w.meetings.size()) w.meetings.push_back({mask, 0, what, {}});
  Meeting& m = w.meetings[i];
  if (m.mask != mask || strcmp(m.what, what)) {
    fail("%s (mask %#x) where lanes of its warp are in %s (mask %#x)", what,
         mask, m.what, m.mask);
  }
  m.here |= bit;
  m.arguments[f.lane] = mine;
  if (m.here != mask) {
    wait(what);
    return;
  }
  const Meeting done = m;
  w.meetings.erase(w.meetings.begin() + long(i));
  body(done.arguments, mask);
  for (int l = 0; l < 32; ++l) {
    if (mask >> l & 1 && l != f.lane) wake(w.lanes[l]);
  }
}

void bar(int id, int count, bool stay) {
  if (id < 0 || id > 15) fail("bar %d", id);
  NamedBarrier& n = current->block->barriers[id];
  if (n.arrived == 0) n.expected = count;
  if (n.expected != count) {
    fail("bar %d of %d threads where others wait for %d", id, count,
         n.expected);
  }
  if (++n.arrived == count) {
    n.arrived = 0;
    for (Fiber* f : n.waiting) wake(f);
    n.waiting.clear();
    return;
  }
  if (!stay) return;
  n.waiting.push_back(current);
  wait(("bar.sync " + std::to_string(id)).c_str());
}

void sync_block() {
  Block& b = *current->block;
  NamedBarrier& n = b.barriers[0];
  ++n.arrived;
  if (n.arrived == b.live) {
    check_block(b);
    return;
  }
  n.waiting.push_back(current);
  wait("__syncthreads");
}

void cluster_arrive() {
  if (current->cluster_arrived) fail("arrives twice at the cluster's barrier");
  current->cluster_arrived = true;
  current->cluster_phase = cluster->phase;
  ++cluster->arrived;
  check_cluster();
}

void cluster_wait() {
  if (!current->cluster_arrived) fail("waits for a barrier without arriving");
  while (cluster->phase == current->cluster_phase) {
    cluster->waiting.push_back(current);
    wait("barrier.cluster.wait");
  }
  current->cluster_arrived = false;
}

void on_exit(Fiber& f) {
  Block& b = *f.block;
  --b.live;
  --cluster->live;
  if (f.cluster_arrived && f.cluster_phase == cluster->phase) {
    --cluster->arrived;
  }
  check_block(b);
  check_cluster();
  if (b.live == 0) {
    for (auto& other : b.fibers) {
      for (auto& s : other->stores) {
        if (!s->done) {
          fail("the block ends while the copy engine reads its shared memory");
        }
      }
    }
    b.ended = true;
  }
}

void barrier_init(uint32_t address, int count) {
  auto& b = *reinterpret_cast<Mbarrier*>(shared(address, 8, 8));
  if (count < 1 || count > 2047) fail("mbarrier of %d arrivals", count);
  b = {kTag, 0, uint32_t(count), 0, count, 0};
}

void barrier_arrive(uint32_t address, int count) {
  Mbarrier& b = mbarrier(address);
  if (b.pending < count) {
    fail("more arrivals than the %d that mbarrier %#x expects", b.expected,
         address);
  }
  b.pending -= count;
  check_phase(address, b);
}

void barrier_expect(uint32_t address, uint32_t bytes) {
  Mbarrier& b = mbarrier(address);
  b.bytes += int(bytes);  // below 0 if some came before they were expected
  if (b.bytes >= 1 << 19) fail("mbarrier of %d bytes", b.bytes);
}

void barrier_bytes(uint32_t address, uint32_t bytes) {
  Mbarrier& b = mbarrier(address);
  b.bytes -= int(bytes);
  check_phase(address, b);
}

bool barrier_done(uint32_t address, uint32_t parity) {
  return mbarrier(address).phase != (parity & 1);
}

void barrier_wait(uint32_t address) {
  waiting[address].push_back(current);
  wait("mbarrier.try_wait");
}

Block& block_at(uint32_t address) {
  const uint32_t rank = (address - windows) / kWindowBytes;
  if (address < windows || rank >= cluster->blocks.size()) {
    fail("shared address %#x is in no block of the cluster", address);
  }
  return cluster->blocks[rank];
}

uint8_t* shared(uint32_t address, uint32_t bytes, uint32_t align) {
  Block& b = block_at(address);
  if (b.ended) fail("touches shared memory of a block that has ended");
  auto* p = reinterpret_cast<uint8_t*>(uintptr_t(address));
  if (address % align)
    fail("shared address %#x, aligned to %u", address, align);
  if (p < b.dynamic || p + bytes > b.dynamic + b.dynamic_bytes) {
    fail("shared bytes [%td, %td) of %u", p - b.dynamic, p - b.dynamic + bytes,
         b.dynamic_bytes);
  }
  return p;
}

void ordinary_write(uint32_t address, uint32_t bytes) {
  Block& b = block_at(address);
  if (b.written.empty()) b.written.resize(kWindowBytes / 16);
  const uint32_t from = address % kWindowBytes;
  for (uint32_t i = from / 16; i < (from + bytes + 15) / 16; ++i) {
    b.written[i] = {current, current->proxy_fences};
  }
}

void check_fenced(uint32_t address, uint32_t bytes) {
  Block& b = block_at(address);
  if (b.written.empty()) return;
  const uint32_t from = address % kWindowBytes;
  for (uint32_t i = from / 16; i < (from + bytes + 15) / 16; ++i) {
    const auto& [fiber, fences] = b.written[i];
    if (fiber && fiber->proxy_fences == fences) {
      fail("the copy engine reads what thread %d wrote without fence.proxy",
           fiber->thread);
    }
  }
}

void finish_copies(Fiber& f, unsigned groups_before) {
  size_t left = 0;
  for (AsyncCopy& c : f.copies) {
    if (c.group < groups_before) {
      memcpy(shared(c.dst, 16, 16), c.src, 16);
    } else {
      f.copies[left++] = c;
    }
  }
  f.copies.resize(left);
}

}  // namespace emu

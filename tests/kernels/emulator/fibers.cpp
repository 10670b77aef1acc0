// Threads of a block as fibers of one CPU thread, and what they wait for: see cuda_runtime.h beside this.
//
// Blocks run one after another. A block's threads run in ascending order in one block and in descending order in the
// next, and the other way round in the next launch: what one reads of another's shared memory without a barrier between
// them differs from block to block, and from one call to its repeat, which tests compare.
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 256 << 10, kSharedBytes = 227 << 10;
constexpr unsigned kMostThreads = 1024;

struct Meeting {
  uint64_t generation = 0;
  uint32_t arrived = 0;
  Lanes lanes[2];  // one is read while the next is filled
};

struct Warp {
  uint32_t alive = 0;
  std::map<uint32_t, Meeting> meetings;  // by mask: parts of a warp may meet apart
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool begun = false, live = false;
  unsigned number = 0;
  dim3 index;
};

struct Block {
  std::vector<Warp> warps;
  unsigned alive = 0, arrived = 0;
  uint64_t generation = 0;
  bool brought[2] = {};
};

std::mutex launches;
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* now = nullptr;
Block here;
jmp_buf scheduler;
const std::function<void()>* work = nullptr;
uint64_t progress = 0;  // arrivals, meetings and ends: where a whole round brings none, all wait for one another
alignas(128) char memory[kSharedBytes];
bool descending = false;
int64_t launched = 0;

// To whoever runs fibers. A fiber goes on here when it is called again.
void yield() {
  if (_setjmp(now->place) == 0) _longjmp(scheduler, 1);
}

void live_forever() {
  for (;;) {
    (*work)();
    now->live = false;
    yield();
  }
}

// Runs one fiber until it waits or ends.
void resume(Fiber& fiber) {
  now = &fiber;
  threadIdx = fiber.index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

Fiber& fiber_of(unsigned number) {
  while (fibers.size() <= number) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack.reset(new char[kStack]);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, live_forever, 0);
    fiber->number = static_cast<unsigned>(fibers.size());
    fibers.push_back(std::move(fiber));
  }
  return *fibers[number];
}

void end(const Fiber& fiber) {
  Warp& warp = here.warps[fiber.number / 32];
  warp.alive &= ~(1u << fiber.number % 32);
  --here.alive;
  ++progress;
}

bool run_block(unsigned count) {
  here.warps.assign((count + 31) / 32, Warp());
  here.alive = count, here.arrived = 0, here.brought[0] = here.brought[1] = false;
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fiber_of(i);
    fiber.live = true;
    fiber.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
    here.warps[i / 32].alive |= 1u << i % 32;
  }
  while (here.alive > 0) {
    const uint64_t before = progress;
    for (unsigned i = 0; i < count; ++i) {
      Fiber& fiber = *fibers[descending ? count - 1 - i : i];
      if (!fiber.live) continue;
      resume(fiber);
      if (!fiber.live) end(fiber);
    }
    if (progress == before) return false;
  }
  return true;
}

}  // namespace

int lane() { return static_cast<int>(now->number % 32); }

void* dynamic_shared() { return memory; }
uint32_t shared_number(const void* pointer) {
  return static_cast<uint32_t>(reinterpret_cast<intptr_t>(pointer) - reinterpret_cast<intptr_t>(memory));
}
void* shared_pointer(uint32_t number) { return memory + static_cast<int32_t>(number); }

bool meet_block(bool mine) {
  const uint64_t generation = here.generation;
  here.brought[generation % 2] |= mine;
  ++here.arrived;
  ++progress;
  // Those that have ended are not waited for.
  while (here.generation == generation) {
    if (here.arrived >= here.alive) {
      here.arrived = 0, ++here.generation, ++progress;
      here.brought[here.generation % 2] = false;
    } else {
      yield();
    }
  }
  threadIdx = now->index;
  return here.brought[generation % 2];
}

Lanes meet_warp(uint32_t mask, uint64_t mine) {
  Warp& warp = here.warps[now->number / 32];
  const uint32_t me = 1u << lane();
  if ((mask & me) == 0) {
    std::fprintf(stderr, "emulator: a lane takes part in an exchange whose mask %08x it is not in\n", mask);
    abort();
  }
  Meeting& meeting = warp.meetings[mask];
  const uint64_t generation = meeting.generation;
  Lanes& lanes = meeting.lanes[generation % 2];
  lanes.all[lane()] = mine;
  meeting.arrived |= me;
  ++progress;
  while (meeting.generation == generation) {
    if ((mask & warp.alive & ~meeting.arrived) == 0) {
      lanes.there = meeting.arrived;
      meeting.arrived = 0, ++meeting.generation, ++progress;
    } else {
      yield();
    }
  }
  threadIdx = now->index;
  return lanes;
}

bool run(dim3 grid, dim3 threads, size_t shared_bytes, const std::function<void()>& kernel) {
  const std::lock_guard<std::mutex> lock(launches);
  const uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
  const bool sane = count > 0 && count <= kMostThreads && threads.z <= 64 && grid.x > 0 && grid.y > 0 && grid.z > 0 &&
                    grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535 && shared_bytes <= kSharedBytes;
  if (!sane) return false;
  ++launched;
  blockDim = threads, gridDim = grid, work = &kernel;
  static bool first_descends = false;
  descending = first_descends = !first_descends;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        descending = !descending;
        if (run_block(static_cast<unsigned>(count))) continue;
        std::fprintf(stderr, "emulator: threads of block %u, %u, %u wait for one another forever\n", x, y, z);
        abort();
      }
    }
  }
  return true;
}

int64_t launches() { return launched; }

}  // namespace emulated

// ---- devices ----

namespace {

// As an H200 has them, and one so small that few rows are many: kernels for many are run by small tensors.
struct Facts {
  int multiprocessors, shared_bytes, l2_bytes;
};
constexpr Facts kDevices[] = {{132, 227 << 10, 50 << 20}, {2, 227 << 10, 4 << 10}};
int current = 0;
cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const Facts& facts = kDevices[device];
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      *value = facts.multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = facts.shared_bytes;
      break;
    case cudaDevAttrL2CacheSize:
      *value = facts.l2_bytes;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 7;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 5;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
void emulated::failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
}

extern "C" {

__attribute__((visibility("default"))) void emulated_device(int device) { current = device; }
__attribute__((visibility("default"))) int64_t emulated_launches() { return emulated::launches(); }

// What libtorch has in builds for CUDA alone.
__attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}

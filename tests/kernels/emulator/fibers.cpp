// Threads of a cluster of blocks as fibers of one CPU thread, and what they wait for: see cuda_runtime.h beside this.
//
// Clusters, and blocks without one, run one after another. Threads run in ascending order in one and in descending
// order in the next: what one reads of another's shared memory without a barrier between them differs from block to
// block, and from one call to its repeat, which tests compare. Shared memory that nobody has written is full of NaNs.
#include "fibers.h"

#include <stdlib.h>

#include <cstdio>  // dprintf
#include <mutex>
#include <set>

// Where address sanitizers look on, what is not a block's may not be touched.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(place, bytes) ((void)(place), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(place, bytes) ((void)(place), (void)(bytes))
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

// As an H200 has them, and one so small that few rows are many: kernels for many are run by small tensors.
struct Facts {
  int multiprocessors, l2_bytes;
};
constexpr Facts kDevices[] = {{132, 50 << 20}, {2, 4 << 10}};
constexpr int kCapability = __CUDA_ARCH__ / 10;
constexpr int kSharedOfBlock = (kCapability >= 90 ? 227 : kCapability >= 80 ? 163 : 64) << 10;
constexpr int kSharedUnasked = 48 << 10;  // a kernel that wants more has to be allowed it
int current = 0;
cudaError_t last_error = cudaSuccess;

}  // namespace

namespace emulated {

Fiber* now = nullptr;
uint64_t progress = 0;
bool prompt = false;

namespace {

constexpr size_t kStack = 256 << 10, kGap = 128;
constexpr size_t kMemory = 1 << 20;  // of a block: what it can have, with gaps; the bits of a shared address
constexpr unsigned kMostThreads = 1024, kMostBlocks = 16, kPortableBlocks = 8;

std::mutex launches_lock;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Block> cluster;
unsigned cluster_alive = 0, cluster_arrived = 0;
uint64_t cluster_generation = 0;
jmp_buf scheduler;
const std::function<void()>* work = nullptr;
bool descending = false;
int64_t launched = 0;
int voice = 2;                           // the file that whoever did something wrong is told in
std::map<const void*, int> most_shared;  // of kernels that have asked for more
std::set<const void*> wide_clusters;     // kernels that may have clusters of more blocks than every device runs

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
  threadIdx = fiber.index, blockIdx = fiber.block->index;
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
    fibers.push_back(std::move(fiber));
  }
  return *fibers[number];
}

void end(Fiber& fiber) {
  check_left_nothing(fiber);
  fiber.block->warps[fiber.number / 32].alive &= ~(1u << fiber.number % 32);
  --fiber.block->alive, --cluster_alive;
  if (fiber.has_arrived && fiber.arrived_in == cluster_generation) --cluster_arrived;
  ++progress;
}

size_t rounded(size_t bytes) { return (bytes + kGap - 1) / kGap * kGap; }

void give(Block& block, void* place, size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(place, bytes);
  std::memset(place, 0xff, bytes);
  block.used = static_cast<size_t>(static_cast<char*>(place) - block.memory) + rounded(bytes) + kGap;
}

void begin(Block& block, dim3 index, unsigned threads, size_t shared_bytes) {
  if (block.memory == nullptr) {
    block.allocated.reset(new char[2 * kMemory]);
    block.memory = block.allocated.get() + (kMemory - number(block.allocated.get()) % kMemory);
  }
  block.index = index, block.places.clear();
  ASAN_POISON_MEMORY_REGION(block.memory, kMemory);
  give(block, block.memory, shared_bytes);
  block.warps.assign((threads + 31) / 32, Warp());
  block.alive = threads, block.arrived = 0, block.brought[0] = block.brought[1] = false;
}

void begin(Fiber& fiber, Block& block, unsigned i) {
  fiber.live = true, fiber.has_arrived = false;
  fiber.block = &block, fiber.number = i;
  fiber.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
  fiber.stores.clear(), fiber.copies.clear(), fiber.open.clear();
  block.warps[i / 32].alive |= 1u << i % 32;
}

void run_cluster(dim3 first, unsigned blocks, unsigned threads, size_t shared_bytes) {
  const unsigned count = blocks * threads;
  for (unsigned rank = 0; rank < blocks; ++rank) {
    begin(cluster[rank], dim3(first.x + rank, first.y, first.z), threads, shared_bytes);
    for (unsigned i = 0; i < threads; ++i) begin(fiber_of(rank * threads + i), cluster[rank], i);
  }
  cluster_alive = count, cluster_arrived = 0;
  while (cluster_alive > 0) {
    const uint64_t before = progress;
    for (unsigned i = 0; i < count; ++i) {
      Fiber& fiber = *fibers[descending ? count - 1 - i : i];
      if (!fiber.live) continue;
      resume(fiber);
      if (!fiber.live) end(fiber);
    }
    if (progress == before && !bring_one()) wrong("threads wait for one another forever");
  }
  check_nothing_is_under_way();
}

// 1 where a launch says nothing of clusters.
unsigned cluster_size(const cudaLaunchConfig_t& how) {
  for (unsigned i = 0; i < how.numAttrs; ++i) {
    if (how.attrs[i].id == cudaLaunchAttributeClusterDimension) return how.attrs[i].val.clusterDim.x;
  }
  return 1;
}

bool is_sane(const cudaLaunchConfig_t& how, const void* kernel) {
  const dim3 grid = how.gridDim, block = how.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const unsigned blocks = cluster_size(how), most = wide_clusters.count(kernel) ? kMostBlocks : kPortableBlocks;
  const auto allowed = most_shared.find(kernel);
  const int shared = allowed == most_shared.end() ? kSharedUnasked : allowed->second;
  return threads > 0 && threads <= kMostThreads && block.z <= 64 && grid.x > 0 && grid.y > 0 && grid.z > 0 &&
         grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535 &&
         how.dynamicSmemBytes <= static_cast<size_t>(shared) && blocks > 0 && blocks <= most && grid.x % blocks == 0 &&
         (blocks == 1 || kCapability >= 90);
}

}  // namespace

// To whoever runs fibers. A fiber goes on here when it is called again.
void yield() {
  if (_setjmp(now->place) == 0) _longjmp(scheduler, 1);
}

void wrong(const char* what) {
  dprintf(voice, "emulator: %s, in block %u, %u, %u\n", what, blockIdx.x, blockIdx.y, blockIdx.z);
  abort();
}

int lane() { return static_cast<int>(now->number % 32); }

void* dynamic_shared() { return now->block->memory; }

void* own_place(const void* type, size_t bytes, size_t alignment) {
  Block& block = *now->block;
  for (const auto& [known, place] : block.places) {
    if (known == type) return place;
  }
  if (alignment > kGap || block.used + bytes > kSharedOfBlock + 64 * kGap) wrong("shared memory is used up");
  void* place = block.memory + block.used;
  give(block, place, bytes);
  block.places.emplace_back(type, place);
  return place;
}

Block& block_of(const void* shared) {
  for (Block& block : cluster) {
    if (number(shared) / kMemory == number(block.memory) / kMemory) return block;
  }
  wrong("an address is not of shared memory");
}

// The upper bits are of another block, its rank and one more.
uint32_t shared_number(const void* pointer) {
  if (&block_of(pointer) != now->block) wrong("an address is of another block's shared memory");
  return static_cast<uint32_t>(number(pointer) % kMemory);
}
uint32_t far_number(uint32_t number, uint32_t rank) {
  return static_cast<uint32_t>(number % kMemory + (rank + 1) * kMemory);
}
void* shared_pointer(uint32_t number) {
  const Block& block = number < kMemory ? *now->block : cluster.at(number / kMemory - 1);
  return block.memory + number % kMemory;
}

bool meet_block(bool mine) {
  Block& here = *now->block;
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
  return here.brought[generation % 2];
}

Lanes meet_warp(uint32_t mask, uint64_t mine) {
  Warp& warp = now->block->warps[now->number / 32];
  const uint32_t me = 1u << lane();
  if ((mask & me) == 0) wrong("a lane takes part in an exchange whose mask it is not in");
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
  return lanes;
}

void cluster_arrive() {
  if (now->has_arrived) wrong("a thread arrives at the cluster's barrier twice");
  now->has_arrived = true, now->arrived_in = cluster_generation;
  ++cluster_arrived, ++progress;
}

void cluster_wait() {
  if (!now->has_arrived) wrong("a thread waits at the cluster's barrier and has not arrived");
  while (cluster_generation == now->arrived_in) {
    if (cluster_arrived >= cluster_alive) {
      cluster_arrived = 0, ++cluster_generation, ++progress;
    } else {
      yield();
    }
  }
  now->has_arrived = false;
}

cudaError_t run(const cudaLaunchConfig_t& how, const void* kernel, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(launches_lock);
  if (!is_sane(how, kernel)) return cudaErrorInvalidValue;
  const dim3 grid = how.gridDim;
  const unsigned blocks = cluster_size(how), threads = how.blockDim.x * how.blockDim.y * how.blockDim.z;
  if (cluster.size() < blocks) cluster.resize(blocks);
  blockDim = how.blockDim, gridDim = grid, work = &thread;
  // In an order without a period: a call's first kernel is to be run in all ways, however many launches a call has.
  descending = __builtin_parityll(launched), prompt = __builtin_parityll(launched >> 1);
  ++launched;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += blocks) {
        descending = !descending;
        run_cluster(dim3(x, y, z), blocks, threads, how.dynamicSmemBytes);
      }
    }
  }
  return cudaSuccess;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute which, int value) {
  const std::lock_guard<std::mutex> lock(launches_lock);
  if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    if (kCapability < 90) return cudaErrorInvalidValue;
    wide_clusters.insert(kernel);
  } else {
    if (value > kSharedOfBlock) return cudaErrorInvalidValue;
    most_shared[kernel] = value;
  }
  return cudaSuccess;
}

cudaError_t most_clusters(int* count, const void* kernel, const cudaLaunchConfig_t& how) {
  const std::lock_guard<std::mutex> lock(launches_lock);
  if (kCapability < 90 || !is_sane(how, kernel)) return cudaErrorInvalidValue;
  *count = kDevices[current].multiprocessors / static_cast<int>(cluster_size(how));
  return cudaSuccess;
}

int64_t launches() { return launched; }
void speaks_to(int file) { voice = file; }

}  // namespace emulated

// ---- devices ----

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const Facts& facts = kDevices[device];
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      *value = facts.multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedOfBlock;
      break;
    case cudaDevAttrL2CacheSize:
      *value = facts.l2_bytes;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = kCapability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = kCapability % 10;
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
__attribute__((visibility("default"))) void emulated_speaks_to(int file) { emulated::speaks_to(file); }
__attribute__((visibility("default"))) int64_t emulated_launches() { return emulated::launches(); }

// What libtorch has in builds for CUDA alone.
__attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}

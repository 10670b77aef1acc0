// What fibers.cpp and copies.cpp know of threads, blocks and clusters.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

namespace emulated {

// A run of bytes that is on its way, or a number if it comes from nowhere; `barrier` counts them when they are there.
struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  void* barrier;
  float number;
};

struct Meeting {
  uint64_t generation = 0;
  uint32_t arrived = 0;
  Lanes lanes[2];  // one is read while the next is filled
};

struct Warp {
  uint32_t alive = 0;
  std::map<uint32_t, Meeting> meetings;  // by mask: parts of a warp may meet apart
};

struct Block {
  dim3 index;
  std::unique_ptr<char[]> allocated;
  char* memory = nullptr;  // dynamic shared memory, then what the kernel declares
  size_t used = 0;
  std::vector<std::pair<const void*, void*>> places;
  std::vector<Warp> warps;
  unsigned alive = 0, arrived = 0;
  uint64_t generation = 0;
  bool brought[2] = {};
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool begun = false, live = false;
  Block* block = nullptr;
  unsigned number = 0;  // in its block
  dim3 index;
  bool has_arrived = false;  // at the cluster's barrier, in its present generation or the one it waits for
  uint64_t arrived_in = 0;
  std::deque<Copy> stores;               // under way, the oldest first
  std::deque<std::vector<Copy>> copies;  // groups under way
  std::vector<Copy> open;                // the group that is not committed
};

extern Fiber* now;
extern uint64_t progress;  // whatever others may have waited for: where a round brings none, all wait forever
extern bool prompt;        // copies arrive at once in this launch, and as late as can be in the next

void yield();
[[noreturn]] void wrong(const char* what);
Block& block_of(const void* shared);

// Has one of the copies that are on their way arrive; false when there is none.
bool bring_one();
// What a thread, and a cluster, may not leave behind.
void check_left_nothing(const Fiber& fiber);
void check_nothing_is_under_way();

}  // namespace emulated

// Rows that are too wide for one block: the blocks of a cluster share one, a part each, and the parts' numbers meet in
// shared memory. From sm_90 on; before that such rows take kernels that need no cluster.
//
// Knows nothing of any op.
#pragma once
#include "rows.cuh"

namespace fuselm {

constexpr int kMaxParts = 16;  // of a row: the most blocks a cluster can have

// How a row is shared out: parts of `vectors` vectors, the last of which may have fewer.
struct Parts {
  int count = 1, vectors = 0;

  // As many as it takes blocks of configuration C to hold it; the width alone decides, never strides or alignment.
  template <typename X, typename C>
  static Parts of(int64_t width) {
    const int64_t all = divide_up(width, kVec<X>);
    Parts parts;
    while (parts.count * C::kLanes * C::kVecs < all) parts.count *= 2;
    parts.vectors = static_cast<int>(divide_up(all, parts.count));
    return parts;
  }
};

// Which row and which part of it a block, or a group of lanes, has.
template <typename X, typename C, bool kParted>
struct Place {
  static constexpr bool kOneRow = !kParted && C::kSoon;  // a block, and no block too many
  int group, lane, rank, skip, count;  // lane: the first of the thread's vectors, which are kLanes apart
  int64_t row;

  __device__ Place(const Parts& parts, int64_t rows, int width) {
    group = C::kKind == Kind::kWide ? 0 : threadIdx.x / C::kLanes;
    lane = C::kKind == Kind::kWide ? wide_vector<C::kLanes, C::kVecs>() : threadIdx.x % C::kLanes;
    rank = kParted ? static_cast<int>(blockIdx.x) % parts.count : 0;
    row = kParted ? blockIdx.x / parts.count : static_cast<int64_t>(blockIdx.x) * C::kGroups + group;
    skip = kParted ? rank * parts.vectors : 0;
    // Where the row is waited for, without a thought for the sign.
    const int all = kOneRow ? static_cast<int>(static_cast<uint32_t>(width) / kVec<X>) : width / kVec<X>;
    // Threads of rows past the end stay for the sums of their block; with no vectors to their name they touch nothing.
    count = kOneRow || row < rows ? (kParted ? min(parts.vectors, all - skip) : all) : 0;
  }
};

// Where kCount numbers of each block of a cluster meet, once.
template <int kCount>
struct Exchange {
  float values[kMaxParts][kCount];
  uint64_t arrived;

  // Comes before the row is asked for, so that its own wait is over when the row is there.
  __device__ void init() {
    if (threadIdx.x == 0) init_barrier(&arrived);
    cluster_arrive();
  }
  __device__ void share(const float (&mine)[kCount], int parts, int rank) {
    cluster_wait();  // nobody sends to a barrier before it is there
    if (threadIdx.x == 0) expect_bytes(&arrived, parts * kCount * static_cast<int>(sizeof(float)));
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (threadIdx.x < parts) send(mine[k], &values[rank][k], &arrived, threadIdx.x);
    }
    wait_for_bytes(&arrived, 0);
  }
};

// Where the sums of a row's parts meet, row after row: each block of the cluster sends its own to all of them. A block
// may send those of the next row before it has had those of this one, so when it sends for round r + 2 all it knows is
// that the others are done with round r - 2: there are four places, taken by turns.
template <int kCount>
struct Meeting {
  static constexpr int kPlaces = 4;
  float sums[kPlaces][kMaxParts][kCount];
  uint64_t arrived[kPlaces];

  // Before anybody sends; a cluster_barrier() must follow.
  __device__ void init() {
    if (threadIdx.x < kPlaces) init_barrier(&arrived[threadIdx.x]);
  }
  __device__ void send_all(const float (&mine)[kCount], int parts, int rank, int64_t round) {
    const int place = static_cast<int>(round % kPlaces);
    if (threadIdx.x == 0) expect_bytes(&arrived[place], parts * kCount * static_cast<int>(sizeof(float)));
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (threadIdx.x < parts) send(mine[k], &sums[place][rank][k], &arrived[place], threadIdx.x);
    }
  }
  __device__ const float (&wait(int64_t round) const)[kMaxParts][kCount] {
    const int place = static_cast<int>(round % kPlaces);
    wait_for_bytes(&arrived[place], static_cast<int>(round / kPlaces % 2));
    return sums[place];
  }
  __device__ void sum_of_parts(float (&all)[kCount], int parts, int64_t round) const {
    const float (&met)[kMaxParts][kCount] = wait(round);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      all[k] = met[0][k];
      for (int part = 1; part < parts; ++part) all[k] += met[part][k];
    }
  }
};

// Clusters that run at the same time, 0 when there can be none. Asked of the driver once; `known` remembers
// one more than the answer.
template <typename Kernel>
int most_clusters(Kernel kernel, const Launch& how, std::atomic<int>& known) {
  if (const int answer = known.load(std::memory_order_relaxed)) return answer - 1;
  int clusters = 0;
  const bool ok = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                  cudaOccupancyMaxActiveClusters(&clusters, kernel, &how.config) == cudaSuccess;
  if (!ok) return cudaGetLastError(), 0;
  known.store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

// A kernel whose clusters of `parts` blocks take a row each. False when this device has none, or not as large ones.
template <typename Kernel, typename Args>
bool launch_parts(Kernel kernel, const Args& a, int64_t rows, int parts, int threads, bool programmatic,
                  const DeviceFacts& facts, std::atomic<int>& known, cudaStream_t stream) {
  if (facts.capability < 90 || parts > kMaxParts) return false;
  Launch how(dim3(static_cast<unsigned>(parts)), threads, 0, stream);
  how.clusters(parts);
  if (most_clusters(kernel, how, known) == 0) return false;
  how.config.gridDim.x = static_cast<unsigned>(rows * parts);
  if (programmatic) how.programmatic();
  if (how(kernel, a) == Status::kOk) return true;
  cudaGetLastError();  // not to be taken for that of the kernel that runs instead
  return false;
}

}  // namespace fuselm

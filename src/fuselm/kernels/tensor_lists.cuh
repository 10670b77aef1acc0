// Lists of tensors, as a kernel that does something to all of them at once takes them.
//
// Knows no op. Every tensor is cut into chunks; a block takes one chunk, and finds by its number whose it is. The list
// is a parameter of the kernel, 32 KiB of it at most, so that no table has to be copied to the device, kept alive there
// or waited for, and a CUDA graph holds it. Tensors need not be contiguous, but must fill their memory: what is done to
// memory in its order is then done to every element.
#pragma once
#include "rows.cuh"

namespace fuselm {
namespace lists {

constexpr int kThreads = 256;
constexpr int kMostParameters = 32764;  // bytes that a kernel may be given

// Which chunk is whose. Chunks of tensor t are first[t] to first[t + 1] - 1.
template <int kCapacity>
struct Chunks {
  int32_t first[kCapacity + 1];
  int32_t tensors;

  __device__ int owner(int chunk) const {
    int low = 0, high = tensors - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

inline int64_t count_of(const TensorView& view) {
  int64_t count = view.present() ? 1 : 0;
  for (int d = 0; d < view.rank; ++d) count *= view.sizes[d];
  return count;
}

// Whether a tensor fills its memory without gaps or overlaps, in whatever order of its dimensions.
inline bool is_dense(const TensorView& view) {
  if (count_of(view) == 0) return true;
  bool used[kMaxRank] = {};
  int64_t expected = 1;
  for (int step = 0; step < view.rank; ++step) {
    int next = -1;
    for (int d = 0; d < view.rank; ++d) {
      if (!used[d] && (view.sizes[d] == 1 || view.strides[d] == expected)) next = d;
    }
    if (next < 0) return false;
    used[next] = true;
    expected *= view.sizes[next];
  }
  return true;
}

// The same element at the same place: what is done to memory in its order is then done to elements alike.
inline bool lies_like(const TensorView& view, const TensorView& like) {
  bool same = same_sizes(view, like);
  for (int d = 0; same && d < like.rank; ++d) same = like.sizes[d] == 1 || view.strides[d] == like.strides[d];
  return same;
}

inline bool is_aligned(const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data) % 16 == 0; }

struct Traits {
  DType param, grad;
  uint8_t group;
  bool vectors;  // quads are aligned
};

__host__ __device__ inline uint8_t packed_traits(const Traits& traits) {
  return static_cast<uint8_t>(static_cast<int>(traits.param) | static_cast<int>(traits.grad) << 2 | traits.group << 4 |
                              traits.vectors << 7);
}
__host__ __device__ inline Traits unpacked_traits(uint8_t bits) {
  return {static_cast<DType>(bits & 3), static_cast<DType>(bits >> 2 & 3), static_cast<uint8_t>(bits >> 4 & 7),
          (bits & 128) != 0};
}
static_assert(static_cast<int>(DType::kBFloat16) <= 3, "two bits of a tensor");

// Four elements of a tensor, asked for and not yet looked at.
struct Quad {
  uint4 raw;

  __device__ void load(const char* tensor, DType dtype, int64_t element, uint64_t policy) {
    if (dtype == DType::kFloat32) {
      raw = load_vector(tensor + element * 4, policy);
    } else {
      const uint2 half = *reinterpret_cast<const uint2*>(tensor + element * 2);
      raw.x = half.x, raw.y = half.y;
    }
  }
  __device__ void get(DType dtype, float (&out)[4]) const {
    if (dtype == DType::kFloat32) {
      unpack<float>(raw, out);
    } else if (dtype == DType::kBFloat16) {
      unpack_pair(raw.x, out[0], out[1], bf16{}), unpack_pair(raw.y, out[2], out[3], bf16{});
    } else {
      unpack_pair(raw.x, out[0], out[1], fp16{}), unpack_pair(raw.y, out[2], out[3], fp16{});
    }
  }
};

}  // namespace lists
}  // namespace fuselm

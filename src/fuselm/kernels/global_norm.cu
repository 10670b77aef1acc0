// The norm of all elements of all tensors of a list. Contract: adamw.py.
//
// Traffic. Every tensor once. Threads. A block adds up the squares of a chunk (tensor_lists.cuh) in fp32, in an order
// that the chunk's length alone decides; then one block adds up those sums, in double, and takes the root.
#include "tensor_lists.cuh"

namespace fuselm {
namespace {

using namespace lists;

constexpr int kTurns = 8;
constexpr int kChunk = kThreads * 4 * kTurns;  // the contract's NORM_CHUNK
constexpr int kMany = 1300;

template <int kCapacity>
struct NormArgs {
  const char* tensor[kCapacity];
  int64_t count[kCapacity];
  Chunks<kCapacity> chunks;
  uint8_t traits[kCapacity];
  float* partial;
};
static_assert(sizeof(NormArgs<kMany>) <= kMostParameters, "what a kernel's parameters may take");

// The sum of the squares of a chunk, in an order that its length alone decides.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads) global_norm_squares_kernel(const __grid_constant__ NormArgs<kCapacity> a) {
  __shared__ float scratch[kThreads / kWarp];
  const int chunk = static_cast<int>(blockIdx.x), index = a.chunks.owner(chunk);
  const Traits traits = unpacked_traits(a.traits[index]);
  const char* tensor = a.tensor[index];
  const int64_t begin = static_cast<int64_t>(chunk - a.chunks.first[index]) * kChunk;
  const int64_t end = min(a.count[index], begin + kChunk);
  const uint64_t policy = read_policy(false);
  float sum = 0.0f;
#pragma unroll 2
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t at = begin + (turn * kThreads + threadIdx.x) * 4;
    float value[4] = {};
    if (likely(traits.vectors && at + 4 <= end)) {
      Quad quad;
      quad.load(tensor, traits.param, at, policy);
      quad.get(traits.param, value);
    } else {
      for (int i = 0; i < 4 && at + i < end; ++i) value[i] = element(tensor, traits.param, at + i);
    }
#pragma unroll
    for (float one : value) sum = fmaf(one, one, sum);
  }
  sum = row_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) a.partial[chunk] = sum;
}

constexpr int kRootThreads = 1024;

__global__ void __launch_bounds__(kRootThreads)
    global_norm_root_kernel(const float* partial, int64_t count, float* norm) {
  __shared__ double sums[kRootThreads];
  wait_for_previous_kernel();
  double sum = 0.0;
  for (int64_t at = threadIdx.x; at < count; at += kRootThreads) sum += partial[at];
  sums[threadIdx.x] = sum;
  for (int step = kRootThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(sums[0]));
}

Status launch_squares(const InputList& tensors, int64_t from, int64_t to, float* partial, int64_t& chunks,
                      cudaStream_t stream) {
  static thread_local NormArgs<kMany> a;
  int used = 0;
  chunks = 0;
  for (int64_t i = from; i < to; ++i) {
    const int64_t count = count_of(tensors[i]);
    if (count == 0) continue;
    a.tensor[used] = static_cast<const char*>(tensors[i].data), a.count[used] = count;
    a.traits[used] = packed_traits({tensors[i].dtype, DType::kAbsent, 0, is_aligned(tensors[i])});
    a.chunks.first[used++] = static_cast<int32_t>(chunks);
    chunks += divide_up(count, kChunk);
  }
  if (used == 0) return Status::kOk;
  if (chunks >= int64_t{1} << 31) return Status::kBadShape;
  a.chunks.first[used] = static_cast<int32_t>(chunks), a.chunks.tensors = used, a.partial = partial;
  global_norm_squares_kernel<kMany><<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(a);
  return launch_status();
}

}  // namespace

Status global_norm(const InputList& tensors, const InOut& partial, const Scalar& norm, Stream stream) {
  if (partial.dtype != DType::kFloat32 || !norm.present()) return Status::kBadDtype;
  int64_t wanted = 0;
  for (int64_t i = 0; i < tensors.count; ++i) {
    if (tensors[i].present() && !is_float(tensors[i].dtype)) return Status::kBadDtype;
    if (tensors[i].rank > kMaxRank || !is_dense(tensors[i])) return Status::kBadShape;
    wanted += divide_up(count_of(tensors[i]), kChunk);
  }
  if (partial.rank != 1 || partial.strides[0] != 1 || partial.sizes[0] < wanted) return Status::kBadWorkspace;
  const DeviceGuard guard(stream.device);
  if (!guard.ok()) return Status::kBadDevice;
  float* at = static_cast<float*>(partial.data);
  for (int64_t from = 0; from < tensors.count; from += kMany) {
    int64_t chunks = 0;
    const Status status =
        launch_squares(tensors, from, at_most(from + kMany, tensors.count), at, chunks, cuda_stream(stream));
    if (status != Status::kOk) return status;
    at += chunks;
  }
  const bool programmatic = wanted > 0 && device_facts(guard.device()).capability >= 90;
  return launch(global_norm_root_kernel, dim3(1), kRootThreads, 0, programmatic, cuda_stream(stream),
                static_cast<const float*>(partial.data), wanted, static_cast<float*>(norm.data));
}

}  // namespace fuselm

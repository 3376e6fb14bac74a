// CUDA implementations of kv_stage, kv_commit and kv_commit_table: one launch for all layers, no host synchronisation,
// nothing allocated, on the current stream. Indices are not checked here: that would need the host.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "bindings/memory.h"
#include "kv_commit/units.h"

namespace specdec::bindings {
namespace {

constexpr int kThreads = 128;
constexpr int kCachesPerLaunch = 256;  // their addresses travel as kernel parameters (4 KiB)

struct Addresses {
  char* base[kCachesPerLaunch];
};

// Block (b, c) moves the accepted slots of row b in cache c.
template <class Unit>
__global__ void __launch_bounds__(kThreads) commit_kernel(Addresses addresses, CacheLayout layout, CommitArguments a) {
  layout.base = addresses.base[blockIdx.y];
  if (a.cache_lengths != nullptr && blockIdx.y == 0 && threadIdx.x == 0) {
    a.cache_lengths[a.cache_rows[blockIdx.x]] = a.lengths[blockIdx.x] + kept_tokens(a, blockIdx.x);
  }
  commit_units<Unit>(layout, a, blockIdx.x, threadIdx.x, blockDim.x);
}

// Block (i, 0) writes the key of node i, block (i, 1) its value.
template <class Unit>
__global__ void __launch_bounds__(kThreads) stage_kernel(StageArguments a) {
  stage_units<Unit>(a, blockIdx.x, static_cast<int>(blockIdx.y), threadIdx.x, blockDim.x);
}

// Calls launch(Unit{}) with the widest type that divides every address and stride.
template <class Launch>
void with_unit(uint64_t alignment, const Launch& launch) {
  switch (copy_unit(alignment)) {
    case 16:
      return launch(uint4{});
    case 8:
      return launch(uint2{});
    case 4:
      return launch(uint32_t{});
    case 2:
      return launch(uint16_t{});
    default:
      return launch(uint8_t{});
  }
}

// The stream that torch is using on the device of a tensor, and that device made current for as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  SPECDEC_CHECK(error == cudaSuccess, op, ": the CUDA launch failed: ", cudaGetErrorString(error));
}

bool same_shape(const CacheLayout& x, const CacheLayout& y) {
  return x.page_stride == y.page_stride && x.slot_stride == y.slot_stride && x.runs == y.runs && x.run_stride == y.run_stride &&
         x.run_bytes == y.run_bytes;
}

// One launch per run of caches with equal strides: one in all for a usual model.
void commit(const CacheLayout* layouts, int64_t count, const CommitArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0) return;
  for (int64_t first = 0, next = 0; first < count; first = next) {
    Addresses addresses;
    uint64_t alignment = 0;
    for (next = first; next < count && next - first < kCachesPerLaunch && same_shape(layouts[next], layouts[first]); ++next) {
      addresses.base[next - first] = layouts[next].base;
      alignment |= alignment_bits(layouts[next]);
    }
    const dim3 grid(static_cast<unsigned>(arguments.rows), static_cast<unsigned>(next - first));
    with_unit(alignment, [&](auto unit) {
      commit_kernel<decltype(unit)><<<grid, kThreads, 0, stream>>>(addresses, layouts[first], arguments);
    });
  }
  check_launch("kv_commit");
}

void kv_commit(
    const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets,
    const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  std::vector<CacheLayout> layouts;
  list_layouts(caches, layouts);
  const OnDevice device(page_table);
  commit(layouts.data(), static_cast<int64_t>(layouts.size()),
         commit_arguments(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths, caches[0].size(0), caches[0].size(1)), device.stream());
}

void kv_commit_table(
    const Tensor& layout, int64_t pages, int64_t page_size, const Tensor& page_table, const Tensor& lengths, const Tensor& path,
    const Tensor& offsets, const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  int64_t count = 0;
  const CacheLayout* layouts = table_layouts(layout, count);
  const OnDevice device(page_table);
  commit(layouts, count, commit_arguments(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths, pages, page_size), device.stream());
}

void kv_stage(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  const StageArguments a = stage_arguments(key, value, key_cache, value_cache, slots);
  if (a.nodes == 0) return;
  const OnDevice device(key);
  const uint64_t alignment = alignment_bits(a.key_cache) | alignment_bits(a.value_cache) | alignment_bits(a.key) | alignment_bits(a.value);
  with_unit(alignment, [&](auto unit) {
    stage_kernel<decltype(unit)><<<dim3(static_cast<unsigned>(a.nodes), 2), kThreads, 0, device.stream()>>>(a);
  });
  check_launch("kv_stage");
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_IMPL(specdec, CUDA, m) {
  m.impl("kv_stage", TORCH_BOX(&specdec::bindings::kv_stage));
  m.impl("kv_commit", TORCH_BOX(&specdec::bindings::kv_commit));
  m.impl("kv_commit_table", TORCH_BOX(&specdec::bindings::kv_commit_table));
}

// CUDA implementations of kv_stage and the commits: one launch for all layers on the current stream, without host
// synchronisation or allocation. Rejecting an index would need the host, so entries outside a cache are skipped.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "bindings/kv_cache.h"
#include "kv_cache/thread_work.h"

namespace specdec::bindings {
namespace {

constexpr int kThreads = 128;
constexpr int kListed = 64;  // caches per launch: their layouts are kernel parameters (3 KiB)

struct Listed {
  CacheLayout each[kListed];
};

template <class Unit>
__device__ __forceinline__ void commit_here(const CacheLayout& from, const CacheLayout& to, const CommitArguments& a) {
  commit_units<Unit>(from, to, a, blockIdx.x, threadIdx.x, blockDim.x);
}

// Block (b, c) moves the accepted slots of row b in cache c. A thread moves the same 16 bytes of every slot if the cache is
// aligned to 16 bytes.
__device__ __forceinline__ void commit_block(const CacheLayout& from, const CacheLayout& to, const CommitArguments& a) {
  if (blockIdx.y == 0 && threadIdx.x == 0) advance_length(a, blockIdx.x);
  switch (copy_unit(alignment_bits(from) | alignment_bits(to))) {
    case 16:
      return commit_here<uint4>(from, to, a);
    case 8:
    case 4:
      return commit_here<uint32_t>(from, to, a);
    default:
      return commit_here<uint8_t>(from, to, a);
  }
}
__global__ void __launch_bounds__(kThreads) commit_listed_kernel(Listed caches, CommitArguments a) {
  commit_block(caches.each[blockIdx.y], caches.each[blockIdx.y], a);
}
// The layouts are on the device, so a captured launch stays valid for the same table.
__global__ void __launch_bounds__(kThreads) commit_table_kernel(const CacheLayout* from, const CacheLayout* to, CommitArguments a) {
  commit_block(from[blockIdx.y], to[blockIdx.y], a);
}

// Block b moves the page ids of row b.
__global__ void __launch_bounds__(kThreads) commit_pages_kernel(CommitArguments a) {
  if (threadIdx.x == 0) advance_length(a, blockIdx.x);
  commit_page_ids(a, blockIdx.x, threadIdx.x, blockDim.x);
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

// Makes a tensor's device current for its lifetime and provides torch's current stream on that device.
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

dim3 rows_and(const CommitArguments& a, int64_t caches) { return dim3(static_cast<unsigned>(a.rows), static_cast<unsigned>(caches)); }

// One launch for every 64 caches.
void kv_commit(
    const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets,
    const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  std::vector<CacheLayout> layouts;
  list_layouts(caches, layouts);
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  SPECDEC_CHECK(same_device(caches[0], page_table), "kv_commit: caches are on another device than page_table, expected one; move it with .to()");
  const CommitArguments a = commit_arguments("kv_commit", tensors, caches[0].size(0), caches[0].size(1));
  const OnDevice device(page_table);
  for (size_t first = 0; first < layouts.size() && a.rows > 0; first += kListed) {
    const size_t count = std::min<size_t>(kListed, layouts.size() - first);
    Listed listed;
    std::copy_n(layouts.begin() + static_cast<std::ptrdiff_t>(first), count, listed.each);
    commit_listed_kernel<<<rows_and(a, static_cast<int64_t>(count)), kThreads, 0, device.stream()>>>(listed, a);
  }
  check_launch("kv_commit");
}

// One launch for all caches, with any layouts.
void kv_commit_table(
    const Tensor& layout, const Tensor& scratch_layout, int64_t pages, int64_t page_size, int64_t scratch_nodes, const Tensor& page_table,
    const Tensor& lengths, const Tensor& path, const Tensor& offsets, const Tensor& num_accepted, std::optional<Tensor> rows,
    std::optional<Tensor> cache_lengths) {
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  check_tables(table_op(scratch_nodes), layout, scratch_layout, page_table);
  const CommitArguments a = commit_arguments(table_op(scratch_nodes), tensors, pages, page_size, scratch_nodes);
  const OnDevice device(page_table);
  if (a.rows > 0) {
    commit_table_kernel<<<rows_and(a, layout.size(0)), kThreads, 0, device.stream()>>>(table_layouts(scratch_layout), table_layouts(layout), a);
  }
  check_launch(table_op(scratch_nodes));
}

void kv_commit_pages(
    const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets, const Tensor& num_accepted,
    std::optional<Tensor> rows, std::optional<Tensor> cache_lengths, const Tensor& cache_page_table) {
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  const CommitArguments a = pages_arguments(tensors, cache_page_table);
  const OnDevice device(page_table);
  if (a.rows > 0) commit_pages_kernel<<<rows_and(a, 1), kThreads, 0, device.stream()>>>(a);
  check_launch("kv_commit_pages");
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
  m.impl("kv_commit_pages", TORCH_BOX(&specdec::bindings::kv_commit_pages));
}

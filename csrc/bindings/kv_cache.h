// Tensor arguments of the cache operators, checked. Shared by CPU and CUDA.
#pragma once
#include <vector>

#include "bindings/arguments.h"
#include "kv_cache/kv_cpu.h"

namespace specdec::bindings {

// Memory layout of a cache [pages, page_size, ...] whose slots consist of equally spaced contiguous runs.
inline CacheLayout layout_of(const Tensor& cache, const char* op) {
  const int64_t dims = cache.dim(), size = static_cast<int64_t>(cache.element_size());
  int64_t run = 1, axis = dims - 1;
  while (axis >= 2 && (cache.size(axis) == 1 || cache.stride(axis) == run)) run *= cache.size(axis--);
  int64_t runs = 1, run_stride = run;
  for (; axis >= 2; --axis) {
    if (cache.size(axis) == 1) continue;
    SPECDEC_CHECK(runs == 1, op, ": a cache of shape ", shape_of(cache),
                  " has slots that are not equally spaced runs, expected [pages, page_size, heads, width] with a contiguous last axis; "
                  "pass the cache itself or a view that only swaps two axes");
    runs = cache.size(axis);
    run_stride = cache.stride(axis);
  }
  return {static_cast<char*>(cache.mutable_data_ptr()), cache.stride(0) * size, cache.stride(1) * size, runs, run_stride * size, run * size};
}

inline bool same_device(const Tensor& one, const Tensor& other) {
  return one.is_cpu() ? other.is_cpu() : !other.is_cpu() && one.get_device_index() == other.get_device_index();
}

inline void list_layouts(const std::vector<Tensor>& caches, std::vector<CacheLayout>& layouts) {
  SPECDEC_CHECK(!caches.empty(), "kv_commit: the list of caches is empty, expected at least one tensor");
  layouts.clear();
  for (const Tensor& cache : caches) {
    SPECDEC_CHECK(cache.dim() >= 2 && cache.size(0) == caches[0].size(0) && cache.size(1) == caches[0].size(1),
                  "kv_commit: a cache has shape ", shape_of(cache), ", expected the pages and page size of the first, ", shape_of(caches[0]),
                  "; one call serves caches that share a page table");
    SPECDEC_CHECK(same_device(cache, caches[0]), "kv_commit: a cache is on another device than the first, expected one; move it with .to()");
    layouts.push_back(layout_of(cache, "kv_commit"));
  }
}

// Whether two contiguous tensors have bytes in common.
inline bool overlap(const Tensor& one, const Tensor& other) {
  const auto begin = [](const Tensor& each) { return static_cast<const char*>(each.const_data_ptr()); };
  const auto end = [&](const Tensor& each) { return begin(each) + each.numel() * static_cast<int64_t>(each.element_size()); };
  return one.numel() > 0 && other.numel() > 0 && begin(one) < end(other) && begin(other) < end(one);
}

// Rows of a CacheTable's layout tensor, int64 [n, 6] on the device of its caches, are CacheLayouts.
inline const CacheLayout* table_layouts(const Tensor& layout) {
  static_assert(sizeof(CacheLayout) == 6 * sizeof(int64_t));
  SPECDEC_CHECK(layout.dim() == 2 && layout.size(1) == 6, "kv_commit: layout must come from a CacheTable");
  return reinterpret_cast<const CacheLayout*>(input<int64_t>(layout, "kv_commit: layout"));
}

// Kernels follow the addresses on the device of the trees, so tables must be on that device.
inline void check_tables(const char* op, const Tensor& layout, const Tensor& scratch_layout, const Tensor& page_table) {
  SPECDEC_CHECK(same_device(layout, page_table) && same_device(scratch_layout, page_table) && layout.size(0) == scratch_layout.size(0), op,
                ": tables ", shape_of(layout), " and ", shape_of(scratch_layout),
                " do not fit, expected one row per cache in both, on the device of page_table; make the CacheTables of tensors on that device");
}

// The operator that a call with tables implements.
inline const char* table_op(int64_t scratch_nodes) { return scratch_nodes != 0 ? "kv_commit_scratch" : "kv_commit"; }

// The arguments that all commits share.
struct CommitTensors {
  const Tensor &page_table, &lengths, &path, &offsets, &num_accepted;
  const std::optional<Tensor>&rows, &cache_lengths;
};

inline CommitArguments commit_arguments(const char* op, const CommitTensors& t, int64_t pages, int64_t page_size, int64_t scratch_nodes = 0) {
  const int64_t rows = t.lengths.numel();
  SPECDEC_CHECK(t.page_table.dim() == 2 && t.page_table.size(0) == rows && t.path.dim() == 2 && t.path.size(0) == rows && t.path.size(1) >= 1 &&
                    t.offsets.numel() == rows + 1 && t.num_accepted.numel() == rows,
                op, ": page_table ", shape_of(t.page_table), ", path ", shape_of(t.path), ", offsets ", shape_of(t.offsets), ", num_accepted ",
                shape_of(t.num_accepted), " do not fit lengths ", shape_of(t.lengths), "; expected [B, P], [B, D + 1], [B + 1], [B], [B]");
  SPECDEC_CHECK(t.rows.has_value() == t.cache_lengths.has_value() && (!t.cache_lengths.has_value() || t.rows->numel() == rows),
                op, ": rows and cache_lengths go together, expected int32 [", rows, "] and int32 [R], or neither");
  const auto read = [&](const Tensor& tensor, const char* name) {
    SPECDEC_CHECK(same_device(tensor, t.page_table), op, ": ", name, " is on another device than page_table, expected one; move it with .to()");
    SPECDEC_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous(), op, ": ", name, " of shape ", shape_of(tensor),
                  " has another dtype or is strided, expected contiguous int32; call .int().contiguous()");
    return static_cast<const int32_t*>(tensor.const_data_ptr());
  };
  CommitArguments a{read(t.page_table, "page_table"), read(t.lengths, "lengths"), read(t.path, "path"), read(t.offsets, "offsets"),
                    read(t.num_accepted, "num_accepted"), rows, t.page_table.size(1), t.path.size(1), pages, page_size, scratch_nodes};
  if (t.cache_lengths.has_value()) {
    a.cache_lengths = const_cast<int32_t*>(read(*t.cache_lengths, "cache_lengths"));
    a.cache_rows = read(*t.rows, "rows");
    a.cache_capacity = t.cache_lengths->numel();
    SPECDEC_CHECK(!overlap(t.lengths, *t.cache_lengths), op, ": lengths and cache_lengths are the same memory, expected a copy; pass lengths.clone()");
  }
  return a;
}

inline CommitArguments pages_arguments(const CommitTensors& t, const Tensor& cache_table) {
  CommitArguments a = commit_arguments("kv_commit_pages", t, 0, 1);
  a.cache_table = output<int32_t>(cache_table, "kv_commit_pages: cache_page_table");
  SPECDEC_CHECK(a.cache_lengths != nullptr && cache_table.dim() == 2 && cache_table.size(0) == a.cache_capacity && cache_table.size(1) == a.pages_per_row,
                "kv_commit_pages: cache_page_table is ", shape_of(cache_table), ", expected [", a.cache_capacity, ", ", a.pages_per_row,
                "], a row for each of cache_lengths and the columns of page_table");
  SPECDEC_CHECK(!overlap(t.page_table, cache_table), "kv_commit_pages: page_table and cache_page_table are the same memory, expected a copy; pass a copy of the rows, as kv_slots makes it");
  return a;
}

inline NewEntries entries_of(const Tensor& entries, const Tensor& cache, const Tensor& slots, const char* name) {
  const bool fits = entries.dim() == 3 && cache.dim() == 4 && entries.size(0) == slots.numel() && entries.size(1) == cache.size(2) &&
                    entries.size(2) == cache.size(3) && entries.scalar_type() == cache.scalar_type();
  SPECDEC_CHECK(fits, "kv_stage: ", name, " has shape ", shape_of(entries), ", expected [", slots.numel(),
                ", heads, width] with heads, width and dtype of its cache ", shape_of(cache));
  SPECDEC_CHECK(entries.numel() == 0 || ((entries.stride(2) == 1 || entries.size(2) == 1) && (cache.stride(3) == 1 || cache.size(3) == 1)), "kv_stage: the last axis of ",
                name, " or its cache is strided, expected contiguous; call .contiguous() on it");
  const int64_t size = static_cast<int64_t>(entries.element_size());
  return {static_cast<const char*>(entries.const_data_ptr()), entries.stride(0) * size, entries.stride(1) * size};
}

// One run per head, because heads of new entries may be strided.
inline CacheLayout head_layout(const Tensor& cache) {
  const int64_t size = static_cast<int64_t>(cache.element_size());
  return {static_cast<char*>(cache.mutable_data_ptr()), cache.stride(0) * size, cache.stride(1) * size,
          cache.size(2), cache.stride(2) * size, cache.size(3) * size};
}

inline StageArguments stage_arguments(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  const auto on_device = [&](const Tensor& tensor, const char* name) {
    SPECDEC_CHECK(same_device(tensor, key), "kv_stage: ", name, " is on another device than key, expected one; move it with .to()");
  };
  on_device(value, "value");
  on_device(key_cache, "key_cache");
  on_device(value_cache, "value_cache");
  on_device(slots, "slots");
  const NewEntries new_key = entries_of(key, key_cache, slots, "key"), new_value = entries_of(value, value_cache, slots, "value");
  SPECDEC_CHECK(key_cache.size(0) == value_cache.size(0) && key_cache.size(1) == value_cache.size(1), "kv_stage: value_cache has shape ",
                shape_of(value_cache), ", expected the pages and page size of key_cache ", shape_of(key_cache));
  return {new_key, new_value, head_layout(key_cache), head_layout(value_cache), input<int64_t>(slots, "kv_stage: slots"),
          slots.numel(), key_cache.size(0), key_cache.size(1)};
}

}  // namespace specdec::bindings

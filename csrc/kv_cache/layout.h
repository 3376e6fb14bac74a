// The memory layout of paged caches [pages, page_size, ...]: addresses of slots and the width of copies. For CPU and CUDA.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#define SPECDEC_UNROLL _Pragma("unroll")
#else
#define SPECDEC_HD inline
#define SPECDEC_UNROLL
#endif

namespace specdec {

// In bytes. A slot has `runs` contiguous runs of `run_bytes`, `run_stride` apart: one run for
// [pages, page_size, heads, width], one per head for a head-first cache.
struct CacheLayout {
  char* base;
  int64_t page_stride, slot_stride, runs, run_stride, run_bytes;
};

// A page and the slot within it.
struct Place {
  int64_t page, offset;
};

// The slot of a position, through the row's page table.
SPECDEC_HD Place place_of(const int32_t* table, int64_t position, int64_t page_size) {
  return {table[position / page_size], position % page_size};
}
// The slot of a flat index page * page_size + offset. Negative indices mean the trash slot, slot 0 of page 0.
SPECDEC_HD Place place_of(int64_t slot, int64_t page_size) {
  return slot < 0 ? Place{0, 0} : Place{slot / page_size, slot % page_size};
}
SPECDEC_HD char* address_of(const CacheLayout& cache, Place place) {
  return cache.base + place.page * cache.page_stride + place.offset * cache.slot_stride;
}
// Offset of byte `at` of a slot from the slot's address.
SPECDEC_HD int64_t within_slot(const CacheLayout& cache, int64_t at) {
  return at / cache.run_bytes * cache.run_stride + at % cache.run_bytes;
}

// The largest of 16, 8, 4, 2, 1 that divides all addresses and sizes of a copy, given their bitwise or.
SPECDEC_HD int64_t copy_unit(uint64_t all_bits) {
  int64_t unit = 16;
  while (all_bits % static_cast<uint64_t>(unit)) unit >>= 1;
  return unit;
}
SPECDEC_HD uint64_t alignment_bits(const CacheLayout& cache) {
  return reinterpret_cast<uint64_t>(cache.base) | static_cast<uint64_t>(cache.page_stride) | static_cast<uint64_t>(cache.slot_stride) |
         static_cast<uint64_t>(cache.run_bytes) | (cache.runs > 1 ? static_cast<uint64_t>(cache.run_stride) : 0u);
}

}  // namespace specdec

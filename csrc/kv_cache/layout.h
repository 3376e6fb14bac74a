// Where a slot of a paged cache lies in memory, and how one slot is copied. Shared by CPU and CUDA.
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

// All numbers in bytes. A slot is `runs` pieces of `run_bytes` contiguous bytes, `run_stride` apart: one piece for
// [pages, page, heads, width], one per head for a head-first cache.
struct CacheLayout {
  char* base;
  int64_t page_stride, slot_stride, runs, run_stride, run_bytes;
};

struct Place {
  int64_t page, offset;
};

// A slot given by a row's position and its page table.
SPECDEC_HD Place place_of(const int32_t* table, int64_t position, int64_t page_size) {
  return {table[position / page_size], position % page_size};
}
// A slot given by its flat number; negative numbers mean the trash, slot 0 of page 0.
SPECDEC_HD Place place_of(int64_t slot, int64_t page_size) {
  return slot < 0 ? Place{0, 0} : Place{slot / page_size, slot % page_size};
}
SPECDEC_HD char* address_of(const CacheLayout& cache, Place place) {
  return cache.base + place.page * cache.page_stride + place.offset * cache.slot_stride;
}
// Where byte `at` of a slot lies, counted from the slot's address.
SPECDEC_HD int64_t within_slot(const CacheLayout& cache, int64_t at) {
  return at / cache.run_bytes * cache.run_stride + at % cache.run_bytes;
}

// Largest of 16, 8, 4, 2, 1 that divides every address and size of a copy, given the bitwise or of all of them.
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

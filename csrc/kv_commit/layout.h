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

// The move number i of a row's accepted path; `moves` is false where nothing has to be copied.
struct PathMove {
  int64_t source, target;
  bool moves;
};
SPECDEC_HD PathMove path_move(const int32_t* path, int32_t first_node, int32_t length, int64_t i) {
  const int64_t source = static_cast<int64_t>(length) + path[i] - first_node;
  const int64_t target = static_cast<int64_t>(length) + i;
  return {source, target, path[i] >= 0 && source != target};
}

}  // namespace specdec

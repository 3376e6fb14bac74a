// What one GPU thread does in kv_commit and kv_stage, as plain functions: csrc/bindings/memory_cuda.cu launches them and
// csrc/sanitize runs them on the host.
#pragma once
#include "kv_commit/kv_cpu.h"

namespace specdec {

// Nodes that a thread reads before it writes the first of them: that many loads are under way at once.
constexpr int64_t kRound = 8;

// Moves units first, first + step, ... of the accepted slots of row b. A thread moves the same bytes of every slot in the
// order of the path, kRound slots at a time. A target never lies behind the source of a later node, so slots that
// overwrite each other need no barrier between threads, and none between reads and writes of a round.
template <class Unit>
SPECDEC_HD void commit_units(const CacheLayout& cache, const CommitArguments& a, int64_t b, int64_t first, int64_t step) {
  constexpr int64_t kBytes = sizeof(Unit);
  const int32_t* path = a.path + b * a.path_width;
  const int32_t* table = a.page_table + b * a.pages_per_row;
  const int32_t first_node = a.offsets[b], length = a.lengths[b];
  const int64_t last = a.num_accepted[b] < a.path_width ? a.num_accepted[b] : a.path_width - 1;
  for (int64_t unit = first; unit < cache.runs * cache.run_bytes / kBytes; unit += step) {
    const int64_t byte = unit * kBytes;
    const int64_t at = byte / cache.run_bytes * cache.run_stride + byte % cache.run_bytes;
    for (int64_t start = 0; start <= last && path[start] >= 0; start += kRound) {
      Unit held[kRound];
      SPECDEC_UNROLL
      for (int64_t j = 0; j < kRound; ++j) {
        if (start + j > last) continue;
        const PathMove move = path_move(path, first_node, length, start + j);
        if (move.moves) held[j] = *reinterpret_cast<const Unit*>(address_of(cache, place_of(table, move.source, a.page_size)) + at);
      }
      SPECDEC_UNROLL
      for (int64_t j = 0; j < kRound; ++j) {
        if (start + j > last) continue;
        const PathMove move = path_move(path, first_node, length, start + j);
        if (move.moves) *reinterpret_cast<Unit*>(address_of(cache, place_of(table, move.target, a.page_size)) + at) = held[j];
      }
    }
  }
}

// Writes units first, first + step, ... of the key (part 0) or value (part 1) of node i.
template <class Unit>
SPECDEC_HD void stage_units(const StageArguments& a, int64_t i, int part, int64_t first, int64_t step) {
  constexpr int64_t kBytes = sizeof(Unit);
  const NewEntries& entries = part == 0 ? a.key : a.value;
  const CacheLayout& cache = part == 0 ? a.key_cache : a.value_cache;
  const char* from = entries.base + i * entries.node_stride;
  char* to = address_of(cache, place_of(a.slots[i], a.page_size));
  for (int64_t unit = first; unit < cache.runs * cache.run_bytes / kBytes; unit += step) {
    const int64_t byte = unit * kBytes, run = byte / cache.run_bytes, rest = byte % cache.run_bytes;
    *reinterpret_cast<Unit*>(to + run * cache.run_stride + rest) =
        *reinterpret_cast<const Unit*>(from + run * entries.head_stride + rest);
  }
}

// Largest of 16, 8, 4, 2, 1 that divides every address and size of a copy, given the bitwise or of all of them.
inline int64_t copy_unit(uint64_t all_bits) {
  int64_t unit = 16;
  while (all_bits % static_cast<uint64_t>(unit)) unit >>= 1;
  return unit;
}
inline uint64_t alignment_bits(const CacheLayout& cache) {
  return reinterpret_cast<uint64_t>(cache.base) | static_cast<uint64_t>(cache.page_stride) | static_cast<uint64_t>(cache.slot_stride) |
         static_cast<uint64_t>(cache.run_bytes) | (cache.runs > 1 ? static_cast<uint64_t>(cache.run_stride) : 0u);
}
inline uint64_t alignment_bits(const NewEntries& entries) {
  return reinterpret_cast<uint64_t>(entries.base) | static_cast<uint64_t>(entries.node_stride) | static_cast<uint64_t>(entries.head_stride);
}

}  // namespace specdec

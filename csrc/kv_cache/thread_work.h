// The work of one GPU thread in the commits and in kv_stage, as plain functions. csrc/bindings/kv_cache_cuda.cu launches
// them, and csrc/sanitize runs them on the host.
#pragma once
#include "kv_cache/kv_cpu.h"

namespace specdec {

// Nodes that a thread reads before its first write, so this many loads are in flight.
constexpr int64_t kRound = 8;

// Copies units first, first + step, ... of the accepted slots of row b. `from` and `to` are the same cache, or a scratch and a
// cache. A thread moves the same bytes of every slot in path order, kRound slots at a time. A target is never behind the
// source of a later node, so neither threads nor the reads and writes of a round need a barrier.
template <class Unit>
SPECDEC_HD void commit_units(const CacheLayout& from, const CacheLayout& to, const CommitArguments& a, int64_t b, int64_t first, int64_t step) {
  constexpr int64_t kBytes = sizeof(Unit);
  const int64_t kept = kept_tokens(a, b);
  for (int64_t unit = first; unit < to.runs * to.run_bytes / kBytes; unit += step) {
    const int64_t out_of = within_slot(from, unit * kBytes), into = within_slot(to, unit * kBytes);
    for (int64_t start = 0; start < kept; start += kRound) {
      Unit held[kRound];
      SPECDEC_UNROLL
      for (int64_t j = 0; j < kRound; ++j) {
        if (start + j >= kept) continue;
        const PathMove move = path_move(a, b, start + j);
        if (move.moves) held[j] = *reinterpret_cast<const Unit*>(address_of(from, move.places.source) + out_of);
      }
      SPECDEC_UNROLL
      for (int64_t j = 0; j < kRound; ++j) {
        if (start + j >= kept) continue;
        const PathMove move = path_move(a, b, start + j);
        if (move.moves) *reinterpret_cast<Unit*>(address_of(to, move.places.target) + into) = held[j];
      }
    }
  }
}

// Writes the page ids of nodes first, first + step, ... of row b to its row of the cache's page table: accepted nodes first,
// then the others, each group in staging order. No page is lost.
SPECDEC_HD void commit_page_ids(const CommitArguments& a, int64_t b, int64_t first, int64_t step) {
  const int32_t* path = a.path + b * a.path_width;
  const int64_t nodes = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b], kept = kept_tokens(a, b), length = a.lengths[b];
  if (a.cache_rows[b] < 0 || a.cache_rows[b] >= a.cache_capacity || length < 0) return;
  int32_t* own = a.cache_table + a.cache_rows[b] * a.pages_per_row;
  for (int64_t node = first; node < nodes && length + node < a.pages_per_row; node += step) {
    int64_t before = 0;
    bool accepted = false;
    for (int64_t i = 0; i < kept; ++i) {
      before += path[i] - a.offsets[b] < node;
      accepted = accepted || path[i] - a.offsets[b] == node;
    }
    const int64_t place = length + (accepted ? before : kept + node - before);
    if (place < a.pages_per_row) own[place] = a.page_table[b * a.pages_per_row + length + node];
  }
}

// Writes units first, first + step, ... of the key (part 0) or value (part 1) of node i, unless its slot is outside the cache.
template <class Unit>
SPECDEC_HD void stage_units(const StageArguments& a, int64_t i, int part, int64_t first, int64_t step) {
  constexpr int64_t kBytes = sizeof(Unit);
  if (beyond_cache(a, i)) return;
  const NewEntries& entries = part == 0 ? a.key : a.value;
  const CacheLayout& cache = part == 0 ? a.key_cache : a.value_cache;
  const char* from = entries.base + i * entries.node_stride;
  char* to = address_of(cache, place_of(a.slots[i], a.page_size));
  for (int64_t unit = first; unit < cache.runs * cache.run_bytes / kBytes; unit += step) {
    const int64_t byte = unit * kBytes;
    *reinterpret_cast<Unit*>(to + within_slot(cache, byte)) =
        *reinterpret_cast<const Unit*>(from + byte / cache.run_bytes * entries.head_stride + byte % cache.run_bytes);
  }
}

inline uint64_t alignment_bits(const NewEntries& entries) {
  return reinterpret_cast<uint64_t>(entries.base) | static_cast<uint64_t>(entries.node_stride) | static_cast<uint64_t>(entries.head_stride);
}

}  // namespace specdec

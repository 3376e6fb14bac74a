#include "kv_commit/kv_cpu.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace specdec {
namespace {

// Bytes that are worth another thread.
constexpr int64_t kGrainBytes = 512 * 1024;

void copy_slot(const CacheLayout& cache, const char* from, char* to) {
  for (int64_t r = 0; r < cache.runs; ++r) {
    std::memcpy(to + r * cache.run_stride, from + r * cache.run_stride, static_cast<size_t>(cache.run_bytes));
  }
}

void write_entries(const NewEntries& entries, CacheLayout cache, const StageArguments& a, int64_t begin, int64_t end) {
  int64_t head_stride = entries.head_stride;
  if (cache.runs > 1 && head_stride == cache.run_bytes && cache.run_stride == cache.run_bytes) {
    cache.run_bytes *= cache.runs;
    cache.runs = 1;
  }
  for (int64_t i = begin; i < end; ++i) {
    const char* from = entries.base + i * entries.node_stride;
    char* to = address_of(cache, place_of(a.slots[i], a.page_size));
    for (int64_t r = 0; r < cache.runs; ++r) {
      std::memcpy(to + r * cache.run_stride, from + r * head_stride, static_cast<size_t>(cache.run_bytes));
    }
  }
}

}  // namespace

KvProblem plan_commit(const CommitArguments& a, std::vector<Move>& moves) {
  for (int64_t b = 0; b < a.rows; ++b) {
    if (a.cache_rows != nullptr && (a.cache_rows[b] < 0 || a.cache_rows[b] >= a.cache_capacity)) {
      return {"rows", b, a.cache_rows[b], a.cache_capacity};
    }
    const int64_t accepted = a.num_accepted[b];
    const int64_t nodes = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b];
    const int32_t* path = a.path + b * a.path_width;
    const int32_t* table = a.page_table + b * a.pages_per_row;
    if (accepted < 0 || accepted >= a.path_width) return {"num_accepted", b, accepted, a.path_width};
    if (path[0] < 0) continue;
    for (int64_t i = 0; i <= accepted && path[i] >= 0; ++i) {
      const int64_t node = static_cast<int64_t>(path[i]) - a.offsets[b];
      if (node < i || node >= nodes) return {"path (index within the row)", b, node, nodes};
      const PathMove move = path_move(path, a.offsets[b], a.lengths[b], i);
      if (!move.moves) continue;
      if (a.lengths[b] < 0 || move.source >= a.pages_per_row * a.page_size) {
        return {"slot", b, move.source, a.pages_per_row * a.page_size};
      }
      const Move copy = {place_of(table, move.source, a.page_size), place_of(table, move.target, a.page_size)};
      for (int64_t page : {copy.source.page, copy.target.page}) {
        if (page < 0 || page >= a.pages) return {"page", b, page, a.pages};
      }
      // Sources increase and lie at or behind their targets, so ascending order never overwrites a later source.
      moves.push_back(copy);
    }
  }
  return {nullptr, 0, 0, 0};
}

void advance_lengths(const CommitArguments& a) {
  if (a.cache_lengths == nullptr) return;
  for (int64_t b = 0; b < a.rows; ++b) a.cache_lengths[a.cache_rows[b]] = a.lengths[b] + kept_tokens(a, b);
}

void apply_moves(const CacheLayout* caches, int64_t count, const std::vector<Move>& moves) {
  if (moves.empty() || count == 0) return;
  const int64_t slot_bytes = caches[0].runs * caches[0].run_bytes;
  const int64_t cache_bytes = std::max<int64_t>(1, slot_bytes * static_cast<int64_t>(moves.size()));
  parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / cache_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (const Move& move : moves) copy_slot(caches[c], address_of(caches[c], move.source), address_of(caches[c], move.target));
    }
  });
}

KvProblem stage(const StageArguments& a) {
  const int64_t slots = a.pages * a.page_size;
  for (int64_t i = 0; i < a.nodes; ++i) {
    if (a.slots[i] >= slots) return {"slot", i, a.slots[i], slots};
  }
  const int64_t node_bytes = std::max<int64_t>(1, 2 * a.key_cache.runs * a.key_cache.run_bytes);
  parallel_for(0, a.nodes, std::max<int64_t>(1, kGrainBytes / node_bytes), [&](int64_t begin, int64_t end) {
    write_entries(a.key, a.key_cache, a, begin, end);
    write_entries(a.value, a.value_cache, a, begin, end);
  });
  return {nullptr, 0, 0, 0};
}

}  // namespace specdec

#include "kv_cache/kv_cpu.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kv_cache/thread_work.h"
#include "parallel.h"

namespace specdec {
namespace {

// Bytes per piece of work that justify another thread.
constexpr int64_t kGrainBytes = 512 * 1024;

void copy_slot(const CacheLayout& source, const char* from, const CacheLayout& target, char* to) {
  const int64_t piece = std::gcd(source.run_bytes, target.run_bytes);
  for (int64_t at = 0; at < target.runs * target.run_bytes; at += piece) {
    std::memcpy(to + within_slot(target, at), from + within_slot(source, at), static_cast<size_t>(piece));
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

namespace {

// Checks row b's path. Its nodes must be in the row's order, after their ancestors.
KvProblem check_row(const CommitArguments& a, int64_t b) {
  if (a.cache_rows != nullptr && (a.cache_rows[b] < 0 || a.cache_rows[b] >= a.cache_capacity)) {
    return {"rows", b, a.cache_rows[b], a.cache_capacity};
  }
  const int64_t accepted = a.num_accepted[b], nodes = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b];
  const int32_t* path = a.path + b * a.path_width;
  if (accepted < 0 || accepted >= a.path_width) return {"num_accepted", b, accepted, a.path_width};
  for (int64_t i = 0; i < kept_tokens(a, b); ++i) {
    const int64_t node = static_cast<int64_t>(path[i]) - a.offsets[b];
    if (node < i || node >= nodes) return {"path (index within the row)", b, node, nodes};
    if (a.scratch_nodes != 0 && path[i] >= a.scratch_nodes) return {"path", b, path[i], a.scratch_nodes};
  }
  return {nullptr, 0, 0, 0};
}

}  // namespace

KvProblem plan_commit(const CommitArguments& a, std::vector<Move>& moves) {
  for (int64_t b = 0; b < a.rows; ++b) {
    const KvProblem problem = check_row(a, b);
    if (problem.text != nullptr) return problem;
    const int64_t slots = a.pages_per_row * a.page_size;
    for (int64_t i = 0; i < kept_tokens(a, b); ++i) {
      const PathMove move = path_move(a, b, i);
      const int64_t farthest = a.scratch_nodes != 0 ? move.target : move.source;
      if (a.lengths[b] < 0 || farthest >= slots) return {"slot", b, farthest, slots};
      if (a.scratch_nodes == 0 && move.source == move.target) continue;
      if (!within_pages(a, move.places.source.page)) return {"page", b, move.places.source.page, a.pages};
      if (!within_pages(a, move.places.target.page)) return {"page", b, move.places.target.page, a.pages};
      // Sources ascend and are at or behind their targets, so ascending order never overwrites a later source.
      moves.push_back(move.places);
    }
  }
  return {nullptr, 0, 0, 0};
}

void advance_lengths(const CommitArguments& a) {
  for (int64_t b = 0; b < a.rows; ++b) advance_length(a, b);
}

void apply_moves(const CacheLayout* from, const CacheLayout* to, int64_t count, const std::vector<Move>& moves) {
  if (moves.empty() || count == 0) return;
  const int64_t slot_bytes = to[0].runs * to[0].run_bytes;
  const int64_t cache_bytes = std::max<int64_t>(1, slot_bytes * static_cast<int64_t>(moves.size()));
  parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / cache_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (const Move& move : moves) copy_slot(from[c], address_of(from[c], move.source), to[c], address_of(to[c], move.target));
    }
  });
}

KvProblem commit_pages(const CommitArguments& a) {
  for (int64_t b = 0; b < a.rows; ++b) {
    const KvProblem problem = check_row(a, b);
    if (problem.text != nullptr) return problem;
    const int64_t end = static_cast<int64_t>(a.lengths[b]) + a.offsets[b + 1] - a.offsets[b];
    if (a.lengths[b] < 0 || end > a.pages_per_row) return {"slot", b, end - 1, a.pages_per_row};
  }
  for (int64_t b = 0; b < a.rows; ++b) commit_page_ids(a, b, 0, 1);
  advance_lengths(a);
  return {nullptr, 0, 0, 0};
}

KvProblem stage(const StageArguments& a) {
  for (int64_t i = 0; i < a.nodes; ++i) {
    if (beyond_cache(a, i)) return {"slot", i, a.slots[i], a.pages * a.page_size};
  }
  const int64_t node_bytes = std::max<int64_t>(1, 2 * a.key_cache.runs * a.key_cache.run_bytes);
  parallel_for(0, a.nodes, std::max<int64_t>(1, kGrainBytes / node_bytes), [&](int64_t begin, int64_t end) {
    write_entries(a.key, a.key_cache, a, begin, end);
    write_entries(a.value, a.value_cache, a, begin, end);
  });
  return {nullptr, 0, 0, 0};
}

}  // namespace specdec

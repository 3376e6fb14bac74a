// kv_stage and the commits on the CPU, on plain pointers: B rows with packed trees of M nodes over paged caches
// [pages, page_size, ...].
#pragma once
#include <cstdint>
#include <vector>

#include "kv_cache/layout.h"

namespace specdec {

// The first invalid argument; `text` is null if all are valid.
struct KvProblem {
  const char* text;
  int64_t row, got, limit;
};

struct CommitArguments {
  // [B, pages_per_row], [B], [B, path_width], [B + 1], [B]
  const int32_t *page_table, *lengths, *path, *offsets, *num_accepted;
  int64_t rows, pages_per_row, path_width, pages, page_size;
  // Slots of a scratch that holds the nodes in packed order; 0: the nodes are staged behind the committed tokens.
  int64_t scratch_nodes = 0;
  // Lengths of all cache rows [cache_capacity]. cache_rows[b], [B], advances by the tokens that batch row b keeps. nullptr:
  // lengths do not change.
  int32_t* cache_lengths = nullptr;
  const int32_t* cache_rows = nullptr;
  int64_t cache_capacity = 0;
  // Page tables of all cache rows [cache_capacity, pages_per_row], for commit_pages: page ids move instead of data.
  int32_t* cache_table = nullptr;
};

// The number of tokens that row b keeps: its path up to num_accepted, or to an earlier end of the path.
SPECDEC_HD int32_t kept_tokens(const CommitArguments& a, int64_t b) {
  int32_t kept = 0;
  while (kept <= a.num_accepted[b] && kept < a.path_width && a.path[b * a.path_width + kept] >= 0) ++kept;
  return kept;
}

struct Move {
  Place source, target;
};

// The copy of node i of row b's accepted path; `moves` is false if nothing can or need be copied.
struct PathMove {
  int64_t source, target;
  Move places;
  bool moves;
};
SPECDEC_HD bool within_pages(const CommitArguments& a, int64_t page) { return page >= 0 && page < a.pages; }
SPECDEC_HD PathMove path_move(const CommitArguments& a, int64_t b, int64_t i) {
  const int32_t* table = a.page_table + b * a.pages_per_row;
  const int64_t node = a.path[b * a.path_width + i], slots = a.pages_per_row * a.page_size;
  PathMove move{node, a.lengths[b] + i, {}, false};
  if (a.scratch_nodes == 0) move.source = a.lengths[b] + node - a.offsets[b];
  if (node < 0 || a.lengths[b] < 0 || move.target >= slots || move.source < 0 || move.source >= (a.scratch_nodes ? a.scratch_nodes : slots)) return move;
  move.places.source = a.scratch_nodes ? Place{0, node} : place_of(table, move.source, a.page_size);
  move.places.target = place_of(table, move.target, a.page_size);
  move.moves = (a.scratch_nodes != 0 || move.source != move.target) && within_pages(a, move.places.target.page) &&
               (a.scratch_nodes != 0 || within_pages(a, move.places.source.page));
  return move;
}

// Sets the length of row b's cache row to the tokens it keeps.
SPECDEC_HD void advance_length(const CommitArguments& a, int64_t b) {
  if (a.cache_lengths == nullptr || a.cache_rows[b] < 0 || a.cache_rows[b] >= a.cache_capacity) return;
  a.cache_lengths[a.cache_rows[b]] = static_cast<int32_t>(static_cast<int64_t>(a.lengths[b]) + kept_tokens(a, b));
}

// Appends the copies of all rows to `moves`, in an order in which none overwrites the source of a later one.
KvProblem plan_commit(const CommitArguments& arguments, std::vector<Move>& moves);

// Advances the lengths of the cache rows, if the arguments have them.
void advance_lengths(const CommitArguments& arguments);

// Copies slots of from[c] to slots of to[c], for `count` caches. Both lists may be the same.
void apply_moves(const CacheLayout* from, const CacheLayout* to, int64_t count, const std::vector<Move>& moves);

// The commit for pages of one slot: page ids move, data does not.
KvProblem commit_pages(const CommitArguments& arguments);

// New keys or values [M, heads, width]: node i, head h at base + i * node_stride + h * head_stride (bytes).
struct NewEntries {
  const char* base;
  int64_t node_stride, head_stride;
};

struct StageArguments {
  NewEntries key, value;
  CacheLayout key_cache, value_cache;
  const int64_t* slots;  // [M]
  int64_t nodes, pages, page_size;
};

// Whether node i's slot is outside the cache. Negative slots are the trash slot, which is inside unless the cache is empty.
SPECDEC_HD bool beyond_cache(const StageArguments& a, int64_t i) {
  const int64_t there = a.pages * a.page_size;
  return there == 0 || a.slots[i] >= there;
}

// Writes the new entries to their slots.
KvProblem stage(const StageArguments& arguments);

}  // namespace specdec

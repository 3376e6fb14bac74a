// Staging and committing of keys and values on the CPU, in terms of plain pointers.
#pragma once
#include <cstdint>
#include <vector>

#include "kv_commit/layout.h"

namespace specdec {

// What is wrong with an argument: `text` is null when nothing is.
struct KvProblem {
  const char* text;
  int64_t row, got, limit;
};

struct CommitArguments {
  const int32_t *page_table, *lengths, *path, *offsets, *num_accepted;
  int64_t rows, pages_per_row, path_width, pages, page_size;
  // Lengths of all rows of the cache, advanced at cache_rows[b] by what row b of the batch keeps; null: left to the caller.
  int32_t* cache_lengths = nullptr;
  const int32_t* cache_rows = nullptr;
  int64_t cache_capacity = 0;
};

// Tokens that row b keeps.
SPECDEC_HD int32_t kept_tokens(const CommitArguments& a, int64_t b) {
  return a.path[b * a.path_width] < 0 ? 0 : a.num_accepted[b] + 1;
}

struct Move {
  Place source, target;
};

// Appends the copies of all rows to `moves` in an order in which none overwrites the source of a later one.
KvProblem plan_commit(const CommitArguments& arguments, std::vector<Move>& moves);

// Advances the lengths of the cache, if the arguments say so.
void advance_lengths(const CommitArguments& arguments);

void apply_moves(const CacheLayout* caches, int64_t count, const std::vector<Move>& moves);

// New keys or values: node i, head h at base + i * node_stride + h * head_stride (bytes).
struct NewEntries {
  const char* base;
  int64_t node_stride, head_stride;
};

struct StageArguments {
  NewEntries key, value;
  CacheLayout key_cache, value_cache;
  const int64_t* slots;
  int64_t nodes, pages, page_size;
};

KvProblem stage(const StageArguments& arguments);

}  // namespace specdec

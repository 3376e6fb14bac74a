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
};

struct Move {
  Place source, target;
};

// Appends the copies of all rows to `moves` in an order in which none overwrites the source of a later one.
KvProblem plan_commit(const CommitArguments& arguments, std::vector<Move>& moves);

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

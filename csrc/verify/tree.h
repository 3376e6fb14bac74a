// tree_plan and tree_verify: integer work on packed trees.
#pragma once
#include <cstdint>

namespace specdec {

// Row offsets start at 0, never decrease and stay within `nodes`.
bool valid_offsets(const int32_t* offsets, int64_t rows, int64_t nodes);

// Largest number of nodes in a row.
int32_t widest_row(const int32_t* offsets, int64_t rows);

struct TreeLinks {
  int32_t *depth, *row, *ancestors, *first_child, *next_sibling;
  int64_t words;  // of ancestors per node
};

// Returns -1, or the packed index of a node whose parent is not legal. Offsets must be valid.
int64_t tree_plan(const int32_t* parents, int64_t nodes, const int32_t* offsets, int64_t rows, const TreeLinks& out);

struct Path {
  int32_t *path, *num_accepted;
  int64_t* next_token;
  int64_t max_depth;
};

enum class Walk { kFine, kTooDeep, kBadLink };

// *row names the request that ended the walk when the answer is not kFine.
Walk tree_verify(const int64_t* tokens, int64_t nodes, const int32_t* offsets, int64_t rows, const int32_t* first_child,
                 const int32_t* next_sibling, const int64_t* node_choice, const bool* scouts, const Path& out,
                 int64_t* row);

}  // namespace specdec

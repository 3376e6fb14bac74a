// tree_plan and exact_match_verify: integer work on packed trees.
#pragma once
#include <algorithm>
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

struct WalkedTree {
  const int64_t* tokens;
  int64_t nodes;
  const int32_t *offsets, *first_child, *next_sibling;
  const bool* score_only;  // or nullptr
};

// Follows choice(node, depth), the target's token after a node, from the root of row b as far as the tree has it.
template <class Choice>
Walk walk_row(const WalkedTree& tree, int64_t b, const Path& out, const Choice& choice) {
  int32_t* path = out.path + b * (out.max_depth + 1);
  std::fill_n(path, out.max_depth + 1, -1);
  out.num_accepted[b] = 0;
  out.next_token[b] = -1;
  if (tree.offsets[b + 1] == tree.offsets[b]) return Walk::kFine;
  int32_t node = tree.offsets[b];
  int64_t accepted = 0;
  path[0] = node;
  while (true) {
    const int64_t token = choice(node, accepted);
    int32_t before = node, child = tree.first_child[node];
    while (child != -1) {
      if (child <= before || child >= tree.nodes) return Walk::kBadLink;
      if (tree.tokens[child] == token && !(tree.score_only && tree.score_only[child])) break;
      before = child;
      child = tree.next_sibling[child];
    }
    if (child == -1) {
      out.num_accepted[b] = static_cast<int32_t>(accepted);
      out.next_token[b] = token;
      return Walk::kFine;
    }
    if (accepted == out.max_depth) return Walk::kTooDeep;
    path[++accepted] = node = child;
  }
}

// *row names the request that ended the walk when the answer is not kFine.
Walk exact_match_verify(const WalkedTree& tree, int64_t rows, const int64_t* node_choice, const Path& out, int64_t* row);

}  // namespace specdec

// Packed trees of B requests with M nodes: offsets [B + 1], tree_plan, and the walk of exact_match_verify and
// replay_verify. Integer arithmetic only.
#pragma once
#include <algorithm>
#include <cstdint>

namespace specdec {

// Whether offsets [rows + 1] start at 0, never decrease and stay within `nodes`.
bool valid_offsets(const int32_t* offsets, int64_t rows, int64_t nodes);

// Largest number of nodes in one tree.
int32_t widest_row(const int32_t* offsets, int64_t rows);

// Results of tree_plan: [M] each, ancestors [M, words].
struct TreeLinks {
  int32_t *depth, *row, *ancestors, *first_child, *next_sibling;
  int64_t words;  // ancestor words per node
};

// parents: [M], indices within the tree, -1 for roots. Returns -1, or the packed index of a node with an invalid parent.
// Offsets must be valid.
int64_t tree_plan(const int32_t* parents, int64_t nodes, const int32_t* offsets, int64_t rows, const TreeLinks& out);

// Results of verification: path [B, max_depth + 1] of packed node indices, -1 padded; num_accepted and next_token [B].
struct Path {
  int32_t *path, *num_accepted;
  int64_t* next_token;
  int64_t max_depth;

  // Clears the results of request b and returns its row of `path`.
  int32_t* start(int64_t b) const {
    int32_t* row = path + b * (max_depth + 1);
    std::fill_n(row, max_depth + 1, -1);
    num_accepted[b] = 0;
    next_token[b] = -1;
    return row;
  }
};

enum class Walk { kFine, kTooDeep, kBadLink };

struct WalkedTree {
  const int64_t* tokens;  // [M]
  int64_t nodes;          // M
  const int32_t *offsets, *first_child, *next_sibling;  // [B + 1], [M], [M]
  const bool* score_only;                               // [M], or nullptr: no node is
};

// Walks tree b from its root along choice(node, depth), the target's token after a node, while a child has that token.
template <class Choice>
Walk walk_row(const WalkedTree& tree, int64_t b, const Path& out, const Choice& choice) {
  int32_t* path = out.start(b);
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

// node_choice: [M]. If the result is not kFine, *row is the request where the walk failed.
Walk exact_match_verify(const WalkedTree& tree, int64_t rows, const int64_t* node_choice, const Path& out, int64_t* row);

}  // namespace specdec

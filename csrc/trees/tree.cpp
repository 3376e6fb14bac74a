#include "trees/tree.h"

#include <algorithm>

namespace specdec {

bool valid_offsets(const int32_t* offsets, int64_t rows, int64_t nodes) {
  if (offsets[0] != 0) return false;
  for (int64_t b = 0; b < rows; ++b)
    if (offsets[b + 1] < offsets[b]) return false;
  return offsets[rows] <= nodes;
}

int32_t widest_row(const int32_t* offsets, int64_t rows) {
  int32_t widest = 0;
  for (int64_t b = 0; b < rows; ++b) widest = std::max(widest, offsets[b + 1] - offsets[b]);
  return widest;
}

int64_t tree_plan(const int32_t* parents, int64_t nodes, const int32_t* offsets, int64_t rows, const TreeLinks& out) {
  std::fill_n(out.first_child, nodes, -1);
  std::fill_n(out.next_sibling, nodes, -1);
  std::fill_n(out.ancestors, nodes * out.words, 0);
  for (int64_t b = 0; b < rows; ++b) {
    const int32_t start = offsets[b], count = offsets[b + 1] - start;
    // Nodes are linked in front of their siblings in reverse order, so lists are in index order.
    for (int32_t i = count - 1; i >= 0; --i) {
      const int32_t parent = parents[start + i];
      if (i == 0 ? parent != -1 : parent < 0 || parent >= i) return start + i;
      if (i == 0) continue;
      out.next_sibling[start + i] = out.first_child[start + parent];
      out.first_child[start + parent] = start + i;
    }
    for (int32_t i = 0; i < count; ++i) {
      const int64_t node = start + i;
      int32_t* own = out.ancestors + node * out.words;
      out.row[node] = static_cast<int32_t>(b);
      out.depth[node] = 0;
      if (i > 0) {
        const int64_t parent = start + parents[node];
        out.depth[node] = out.depth[parent] + 1;
        std::copy_n(out.ancestors + parent * out.words, out.words, own);
      }
      own[i >> 5] = static_cast<int32_t>(static_cast<uint32_t>(own[i >> 5]) | (1u << (i & 31)));
    }
  }
  for (int64_t node = offsets[rows]; node < nodes; ++node) out.row[node] = -1, out.depth[node] = 0;
  return -1;
}

Walk exact_match_verify(const WalkedTree& tree, int64_t rows, const int64_t* node_choice, const Path& out, int64_t* row) {
  for (*row = 0; *row < rows; ++*row) {
    const Walk walk = walk_row(tree, *row, out, [&](int64_t node, int64_t) { return node_choice[node]; });
    if (walk != Walk::kFine) return walk;
  }
  return Walk::kFine;
}

}  // namespace specdec

// tree_expand: the best children of N border nodes in B growing trees, and the best children of each tree. tree_grow: the
// table of growing trees (tree_begin, tree_enter).
#pragma once
#include "distribution/distribution.h"

namespace specdec {

// Children of N nodes: tokens and scores [N, width]; best [B, keep] holds flat indices into them, -1 padded.
template <class Real>
struct Children {
  int64_t* tokens;
  Real* scores;
  int32_t* best;
  int64_t width, keep;
  Real sharpness;  // scores are the log-softmax of sharpness * z
};

// dists: inv_t, cut and tie_id of the nodes, [N] (lse is not read). parents: scores of the nodes, [N]. seeds and positions:
// [N], replay noise at positions that are not negative; nullptr: no noise. offsets: [B + 1], the nodes of each tree.
template <class Real>
void tree_expand(const TokenDistributions& dists, const int32_t* offsets, int64_t rows, const Real* parents, const int64_t* seeds,
                 const int32_t* positions, const Children<Real>& out);

// Growing trees, [B, columns] each. Column 0 is the root; the `keep` columns from 1 + level * keep hold the children of a
// level, best first. parents: columns. nodes: a column's index in its tree, -1 for columns outside it.
template <class Real>
struct Growth {
  int64_t* tokens;
  Real* scores;
  int32_t *parents, *nodes;
  const int32_t* limits;  // [B], final nodes of each tree without the root, at most `keep`
  int64_t columns, keep, level;
  int64_t reach;  // largest number of nodes of a level that get children
  bool last;
  // The first column whose node gets children on this level.
  int64_t ahead() const { return level == 0 ? 0 : 1 + (level - 1) * keep; }
  // The first column of this level's children.
  int64_t block() const { return 1 + level * keep; }
};

// Packed trees: tokens and parents [capacity], padded with 0 and -1. counts: [2, B], the nodes of each tree and the depth of
// the deepest.
struct PackedTrees {
  int64_t* tokens;
  int32_t *parents, *counts;
  int64_t capacity;
};

// Resets the trees to their roots. The tokens of the roots must be present.
template <class Real>
void tree_begin(const Growth<Real>& growth, int64_t rows);

// Enters the children of a level into the table and packs the trees to score next or, on the last level, the final trees.
// Returns -1, or the flat index of a column that earlier levels cannot have written (no valid parent, or too many nodes).
template <class Real>
int64_t tree_enter(const Growth<Real>& growth, const Children<Real>& children, const int32_t* offsets, int64_t rows,
                   const PackedTrees& out);

}  // namespace specdec

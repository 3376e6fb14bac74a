// tree_expand: the best children of the nodes at the border of growing trees, and the best of each tree's.
#pragma once
#include "distribution/distribution.h"

namespace specdec {

// Where the children of N nodes go: [N, width] each; best: [rows, keep] flat indices into them, -1 padded.
template <class Real>
struct Children {
  int64_t* tokens;
  Real* scores;
  int32_t* best;
  int64_t width, keep;
  Real sharpness;  // of scores: the log-softmax is that of sharpness * z
};

// distributions: inv_t, cut and tie_id of N nodes (lse is not read); parents: their scores, Real; seeds and
// positions: keyed replay noise where a position is not negative, or nullptr for none. offsets: [rows + 1], the nodes
// of each tree.
template <class Real>
void tree_expand(const TokenDistributions& dists, const int32_t* offsets, int64_t rows, const Real* parents, const int64_t* seeds,
                 const int32_t* positions, const Children<Real>& out);

// Trees that grow, [rows, columns] each: column 0 is the root, columns 1 + level * keep and on hold what a level
// found, the best first. parents: columns; nodes: a column's place in its tree, -1 outside of it.
template <class Real>
struct Growth {
  int64_t* tokens;
  Real* scores;
  int32_t *parents, *nodes;
  const int32_t* limits;  // [rows] nodes of a tree in the end, at most `keep`
  int64_t columns, keep, level;
  int64_t reach;  // most nodes of a level that go on
  bool last;
  // The column of a tree's first node that gets children on this level.
  int64_t ahead() const { return level == 0 ? 0 : 1 + (level - 1) * keep; }
  int64_t block() const { return 1 + level * keep; }
};

// Packed trees, `room` nodes, 0 and -1 behind the last one; counts: [2, rows] nodes of each and the depth of its
// deepest.
struct PackedTrees {
  int64_t* tokens;
  int32_t *parents, *counts;
  int64_t room;
};

// Empty trees: roots whose tokens are there already.
template <class Real>
void tree_begin(const Growth<Real>& growth, int64_t rows);

// Enters the children of a level and packs what is scored next or, on the last level, the best of each tree. Returns
// -1, or a column of a tree that the levels before cannot have written: its parent is none, or there are too many
// nodes.
template <class Real>
int64_t tree_enter(const Growth<Real>& growth, const Children<Real>& children, const int32_t* offsets, int64_t rows,
                   const PackedTrees& out);

}  // namespace specdec

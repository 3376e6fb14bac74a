// tree_expand: the best children of the nodes at the border of growing trees, and the best of each tree's.
#pragma once
#include "verify/law.h"

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

// laws: inv_t, cut and tie_id of N nodes (lse is not read); parents: their scores, Real; seeds and positions: keyed replay noise
// where a position is not negative, or nullptr for none. offsets: [rows + 1], the nodes of each tree.
template <class Real>
void tree_expand(const Laws& laws, const int32_t* offsets, int64_t rows, const Real* parents, const int64_t* seeds,
                 const int32_t* positions, const Children<Real>& out);

}  // namespace specdec

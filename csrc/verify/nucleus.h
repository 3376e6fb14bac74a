// Exact top-k, top-p and min-p of one row without sorting it: a bound that surely keeps every survivor picks
// candidates out of the row, then a (weighted) quickselect finds the last survivor.
#pragma once
#include "verify/rows.h"

namespace specdec {

// The kept set is a prefix of (logit descending, id ascending): its last element and its log-normaliser.
template <class Real>
struct Nucleus {
  Real lse, cut;
  int32_t tie_id;
};

// The row has no NaN or +inf, its largest logit times inv_t is finite; inv_t > 0; top_k: 0 is off; top_p: 1 is off; min_p: 0 is off.
template <class Real>
Nucleus<Real> select_nucleus(Scalar type, const void* row, int64_t vocab, Real inv_t, int64_t top_k, float top_p,
                             float min_p);

}  // namespace specdec

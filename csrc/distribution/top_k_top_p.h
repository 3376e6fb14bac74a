// Exact top-k, top-p and min-p of one row [V] without sorting it.
//
// The kept set is a prefix of (logit descending, id ascending). A window of logits contains the prefix's last element.
// Passes that count or sum the elements above a few thresholds narrow it, and a (weighted) quickselect finishes.
#pragma once
#include "distribution/rows.h"

namespace specdec {

// The last kept element and the log-normaliser of the kept set.
template <class Real>
struct Nucleus {
  Real lse, cut;
  int32_t tie_id;
};

// The row must have no NaN or +inf, a finite largest logit * inv_t, and inv_t > 0. top_k = 0, top_p = 1 and min_p = 0 turn
// the filters off.
template <class Real>
Nucleus<Real> select_nucleus(Scalar type, const void* row, int64_t vocab, Real inv_t, int64_t top_k, float top_p,
                             float min_p);

}  // namespace specdec

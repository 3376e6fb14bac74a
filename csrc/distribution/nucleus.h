// Exact top-k, top-p and min-p of one row without sorting it.
//
// The kept set is a prefix of (logit descending, id ascending). A window of levels that surely holds the prefix's last
// element is narrowed by passes that count or weigh the elements above a few levels at once; the few elements of the
// window then go through a (weighted) quickselect.
#pragma once
#include "distribution/rows.h"

namespace specdec {

// The last kept element and the log-normaliser of the kept set.
template <class Real>
struct Nucleus {
  Real lse, cut;
  int32_t tie_id;
};

// The row has no NaN or +inf, its largest logit times inv_t is finite; inv_t > 0; top_k: 0 is off; top_p: 1 is off;
// min_p: 0 is off.
template <class Real>
Nucleus<Real> select_nucleus(Scalar type, const void* row, int64_t vocab, Real inv_t, int64_t top_k, float top_p,
                             float min_p);

}  // namespace specdec

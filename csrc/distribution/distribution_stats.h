// distribution_stats: sampling parameters and a pass over the logits -> (inv_t, lse, cut, tie_id).
#pragma once
#include "distribution/distribution.h"

namespace specdec {

struct SamplingRows {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
};

// nullptr if every parameter is in range, else the name of the one that is not and its row.
const char* invalid_parameter(const SamplingRows& sampling, int64_t rows, int64_t* row);

// inv_t, lse, cut and mass: double for Float64 logits, else float. mass: nullptr, or the masses of each row's race
// blocks, [rows, block_count(columns)]; NaN throughout for rows that are greedy, filtered, without a distribution or
// with a normaliser beyond 1e4.
void distribution_stats(const Matrix& logits, const SamplingRows& sampling, void* inv_t, void* lse, void* cut, int32_t* tie_id,
               void* mass = nullptr);

// Statistics of rows that are found when they are first asked for. A row with lse = +inf was not; each row is asked for
// by one thread.
struct AskedRows {
  Matrix logits;
  SamplingRows sampling;
  void *inv_t, *lse, *cut;
  int32_t* tie_id;
  void* mass;
};

// At least 1 / p of a token, and at most kRough times as much, by rows::rough_total; NaN where that cannot tell, and
// for rows that were asked for, are greedy or have filters.
double rough_inverse(const AskedRows& asked, int64_t row, int64_t token, double enough);

// Upper bounds of the masses of a row's race blocks, at most kRough times too large, in units that `dist` has: its
// weights are those of the row's distribution but for one factor near 1. False where that cannot be told, as in
// rough_inverse.
bool rough_dist(const AskedRows& asked, int64_t row, DistributionRow<float>* dist, double* masses);

// Marks `count` rows as not asked for: inv_t, cut and tie_id 0, lse +inf, masses NaN.
void forget(const AskedRows& asked, int64_t first, int64_t count);

}  // namespace specdec

// distribution_stats: the statistics (inv_t, lse, cut, tie_id), [R] each, of logits [R, V] under sampling parameters. Also
// their computation on first use (LazyStats) and rough bounds that replace them.
#pragma once
#include "distribution/distribution.h"

namespace specdec {

// Sampling parameters of each row, [R].
struct SamplingRows {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
};

// The name of the first parameter out of range and its row, or nullptr.
const char* invalid_parameter(const SamplingRows& sampling, int64_t rows, int64_t* row);

// inv_t, lse, cut and mass: double for Float64 logits, else float. mass: nullptr, or block masses [R, block_count(V)].
// Rows of mass are NaN if the row is greedy, filtered or broken, or if its normaliser exceeds 1e4.
void distribution_stats(const Matrix& logits, const SamplingRows& sampling, void* inv_t, void* lse, void* cut, int32_t* tie_id,
               void* mass = nullptr);

// Statistics that are computed on first use. lse = +inf marks a row that is not computed. Only one thread uses a row.
struct LazyStats {
  Matrix logits;
  SamplingRows sampling;
  void *inv_t, *lse, *cut;
  int32_t* tie_id;
  void* mass;
};

// An upper bound of 1 / p of a token, at most kRough times too large, from rows::rough_total. NaN if there is no bound,
// and for rows that are computed, greedy or filtered.
double rough_inverse(const LazyStats& lazy, int64_t row, int64_t token, double enough);

// Upper bounds of a row's block masses, at most kRough times too large, in the units of `dist`. The weights of `dist` are
// those of the row's distribution times one factor near 1. False if there is no bound, as in rough_inverse.
bool rough_dist(const LazyStats& lazy, int64_t row, DistributionRow<float>* dist, double* masses);

// Marks `count` rows as not computed: inv_t, cut and tie_id 0, lse +inf, masses NaN.
void mark_uncomputed(const LazyStats& lazy, int64_t first, int64_t count);

}  // namespace specdec

// A batch of distributions as the operators receive it: logits [R, V] with a row stride, and the statistics of
// distribution_stats, [R] each.
#pragma once
#include <cmath>
#include <cstddef>
#include <limits>

#include "distribution/rows.h"

namespace specdec {

// Logits per piece of work that justify another thread (tens of microseconds).
constexpr int64_t kGrain = int64_t{1} << 17;

// Rows per piece of work for a pass over `vocab` logits per row.
inline int64_t row_grain(int64_t vocab) { return vocab >= kGrain ? 1 : kGrain / (vocab > 32 ? vocab : 32); }
inline int64_t block_count(int64_t vocab) { return (vocab + kVocabBlock - 1) / kVocabBlock; }
inline int block_size(int64_t vocab, int64_t block) {
  const int64_t left = vocab - block * kVocabBlock;
  return static_cast<int>(left < kVocabBlock ? left : kVocabBlock);
}

// Logits [rows, columns]; stride: elements between rows.
struct Matrix {
  const void* data;
  int64_t rows, columns, stride;
  Scalar type;

  const void* at(int64_t row, int64_t column) const {
    const int64_t size = type == Scalar::Float64 ? 8 : type == Scalar::Float32 ? 4 : 2;
    return static_cast<const char*>(data) + (row * stride + column) * size;
  }
  double logit(int64_t row, int64_t column) const {
    const void* p = at(row, column);
    switch (type) {
      case Scalar::Float32:
        return *static_cast<const float*>(p);
      case Scalar::BFloat16:
        return widen(*static_cast<const BFloat16*>(p));
      case Scalar::Half:
        return widen(*static_cast<const Half*>(p));
      default:
        return *static_cast<const double*>(p);
    }
  }
};

struct LazyStats;
void compute_stats(const LazyStats& lazy, int64_t row, bool alone);

struct TokenDistributions {
  Matrix logits;
  const void *inv_t, *lse, *cut;  // double for Float64 logits, else float
  const int32_t* tie_id;
  // Block masses [rows, block_count(columns)], double for Float64 logits, else float. Rows of NaN are unknown; nullptr:
  // all are.
  const void* mass = nullptr;
  // Source of statistics that are computed on first use (distribution_stats.h); nullptr: all are computed.
  const LazyStats* lazy = nullptr;

  // Computes the statistics of row r if they are missing. With `lazy`, call it before anything but rough_inverse and
  // rough_dist. alone: run on the calling thread only, because other threads work on other rows.
  void ensure(int64_t r, bool alone) const {
    if (lazy != nullptr) compute_stats(*lazy, r, alone);
  }
  bool wide() const { return logits.type == Scalar::Float64; }
  template <class Real>
  DistributionRow<Real> row(int64_t r) const {
    return {static_cast<const Real*>(inv_t)[r], static_cast<const Real*>(lse)[r], static_cast<const Real*>(cut)[r],
            tie_id[r]};
  }
  bool greedy(int64_t r) const {
    return wide() ? static_cast<const double*>(inv_t)[r] == 0 : static_cast<const float*>(inv_t)[r] == 0;
  }
  // No token has weight: the row has a NaN or +inf logit, or no finite one.
  bool broken(int64_t r) const {
    return wide() ? std::isnan(static_cast<const double*>(lse)[r]) : std::isnan(static_cast<const float*>(lse)[r]);
  }

  // Every token with a finite logit has weight.
  bool unfiltered(int64_t r) const { return !wide() && row<float>(r).cut == -std::numeric_limits<float>::infinity(); }
  // Two indices of one row: the same logits in memory and the same statistics.
  bool same(int64_t r, int64_t s) const {
    return r == s || (logits.at(r, 0) == logits.at(s, 0) &&
                      (wide() ? row<double>(r) == row<double>(s) : row<float>(r) == row<float>(s)));
  }
  // The block masses of row r are known.
  bool has_masses(int64_t r) const { return mass != nullptr && !std::isnan(block_mass(r, 0)); }
  double block_mass(int64_t r, int64_t block) const {
    const int64_t at = r * block_count(logits.columns) + block;
    return wide() ? static_cast<const double*>(mass)[at] : static_cast<const float*>(mass)[at];
  }

  // Log of one weight, -inf for weight 0, rounded as in the reference.
  double log_weight(int64_t r, int64_t column) const {
    return wide() ? log_weight_as<double>(r, column) : log_weight_as<float>(r, column);
  }
  template <class Real>
  double log_weight_as(int64_t r, int64_t column) const {
    const DistributionRow<Real> dist = row<Real>(r);
    const Real logit = static_cast<Real>(logits.logit(r, column));
    if (!dist.keeps(logit, column)) return -std::numeric_limits<double>::infinity();
    if (dist.inv_t == 0) return 0;
    const Real value = logit * dist.inv_t - dist.lse;
    return value == value ? value : -std::numeric_limits<double>::infinity();
  }

  // Weights of columns first .. first + count - 1 (at most kVocabBlock), zero padded to a multiple of kPad.
  void weights(int64_t r, int64_t first, int count, float* out) const {
    rows::weights(logits.type, logits.at(r, first), count, static_cast<int32_t>(first), row<float>(r), out);
  }
  void weights(int64_t r, int64_t first, int count, double* out) const {
    if (wide()) {
      rows::weights(logits.type, logits.at(r, first), count, static_cast<int32_t>(first), row<double>(r), out);
      return;
    }
    alignas(64) float narrow_out[kVocabBlock];
    weights(r, first, count, narrow_out);
    for (int i = 0; i < count; ++i) out[i] = narrow_out[i];
    for (int i = count; i % kPad != 0; ++i) out[i] = 0;
  }
};

// Writes the log of an upper bound of every block's mass to bounds [count, block_count(V)], -inf for blocks without mass.
// Sample i is from row wanted[i] of the distributions (skipped if negative). With a draft and draft_rows[i] >= 0 it is
// from the residual of that row after draft row draft_rows[i]. Known masses are such bounds and cost no pass.
void block_bounds(const TokenDistributions& dists, const int64_t* wanted, int64_t count, double* bounds, const TokenDistributions* draft = nullptr,
                  const int64_t* draft_rows = nullptr);

// Calls function(Real{}) with double if target or draft logits are Float64, else with float.
template <class Function>
void with_accumulator(const TokenDistributions& target, const TokenDistributions* draft, const Function& function) {
  if (target.wide() || (draft != nullptr && draft->wide()))
    function(double{});
  else
    function(float{});
}

}  // namespace specdec

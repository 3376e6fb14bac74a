// Row passes for float64 logits: plain loops and libm, the precise counterpart of rows_body.h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "distribution/rows.h"

namespace specdec::rows {
namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double* doubles(const void* row) { return static_cast<const double*>(row); }
}  // namespace

double masses(Scalar type, const void* row, int64_t count, double inv_t, double* sums) {
  const double* p = doubles(row);
  const double top = largest(type, row, count, inv_t);
  const double logit = top > -kInfinity && top < kInfinity ? top : 0.0;
  for (int64_t first = 0; first < count; first += kVocabBlock) {
    double sum = 0;
    for (int64_t i = first; i < count && i < first + kVocabBlock; ++i)
      sum += p[i] == kInfinity ? std::nan("") : std::exp((p[i] - logit) * inv_t);
    sums[first / kVocabBlock] = sum;
  }
  return top == -kInfinity ? top : logit * inv_t;
}

double mass_bound(Scalar type, const void* piece, int count, const DistributionRow<double>& dist) {
  const double top = largest(type, piece, count, dist.inv_t);
  return top >= dist.cut ? count * std::exp(top * dist.inv_t - dist.lse) : 0.0;
}

Peak<double> peak(Scalar, const void* row, int64_t count, double) {
  const double* p = doubles(row);
  Peak<double> best{-kInfinity, 0, false};
  for (int64_t i = 0; i < count; ++i) {
    if (p[i] != p[i]) best.nan = true;
    if (p[i] > best.logit) best.logit = p[i], best.id = static_cast<int32_t>(i);
  }
  return best;
}

double largest(Scalar, const void* row, int64_t count, double) {
  const double* p = doubles(row);
  double top = -kInfinity;
  for (int64_t i = 0; i < count; ++i) top = p[i] > top ? p[i] : top;
  return top;
}

double mass64(Scalar, const void* row, int64_t count, double inv_t, double top, double floor) {
  const double* p = doubles(row);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    if (p[i] > floor) sum += std::exp(p[i] * inv_t - top);
  return sum;
}

void above(Scalar, const void* row, int64_t count, double inv_t, double top, const double* edges, double* masses,
           int64_t* counts) {
  const double* p = doubles(row);
  for (int k = 0; k < kEdges; ++k) {
    counts[k] = 0;
    double sum = 0;
    for (int64_t i = 0; i < count; ++i)
      if (p[i] > edges[k]) {
        ++counts[k];
        if (masses != nullptr) sum += std::exp((p[i] - top) * inv_t);
      }
    if (masses != nullptr) masses[k] = sum;
  }
}

int64_t collect(Scalar, const void* row, int64_t count, double low, double high, int64_t limit, Entry<double>* out) {
  const double* p = doubles(row);
  int64_t found = 0;
  for (int64_t i = 0; i < count && found <= limit; ++i)
    if (p[i] >= low && p[i] <= high) out[found++] = {p[i], static_cast<int32_t>(i)};
  return found;
}

void weights(Scalar, const void* piece, int count, int32_t first, const DistributionRow<double>& dist, double* out) {
  const double* p = doubles(piece);
  for (int i = 0; i < count; ++i)
    out[i] = dist.keeps(p[i], first + i) ? std::exp(p[i] * dist.inv_t - dist.lse) : 0.0;
  for (int i = count; i % kPad != 0; ++i) out[i] = 0;
}

void replay(Scalar, const void* piece, int count, int32_t first, const DistributionRow<double>& dist, const Counter& counter,
            Best<double>* best) {
  const double* p = doubles(piece);
  for (int i = 0; i < count; ++i) {
    if (!dist.keeps(p[i], first + i)) continue;
    const double score = p[i] * dist.inv_t + gumbel(random_word(counter, static_cast<uint32_t>(first + i)));
    if (score > best->score) *best = {score, first + i};
  }
}

void scaled_logits(Scalar, const void* row, int64_t count, double inv_t, const float* noise, double* out, double* tops) {
  constexpr double none = -std::numeric_limits<double>::infinity();
  const double* p = doubles(row);
  if (tops != nullptr) std::fill_n(tops, kTops, none);
  for (int64_t i = 0; i < count; ++i) {
    const double scaled = p[i] * inv_t;
    out[i] = (scaled == scaled ? scaled : none) + (noise != nullptr ? noise[i] : 0.0);
    if (tops != nullptr) tops[i % kTops] = std::max(tops[i % kTops], out[i]);
  }
}

void subtract(double* p, const double* q, int count) {
  for (int i = 0; i < count; ++i) p[i] = p[i] > q[i] ? p[i] - q[i] : 0.0;
}

double total(const double* weights, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += weights[i];
  return sum;
}

void gumbel_max(const double* weights, int count, int32_t first, const Counter& counter, Best<double>* best) {
  for (int i = 0; i < count; ++i) {
    if (!(weights[i] > 0)) continue;
    const double score = std::log(weights[i]) + gumbel(random_word(counter, static_cast<uint32_t>(first + i)));
    if (score > best->score) *best = {score, first + i};
  }
}

double log(double weight) { return std::log(weight); }

}  // namespace specdec::rows

#include "distribution/distribution_stats.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "distribution/top_k_top_p.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kChunk = 32 * kVocabBlock;  // logits per piece when threads share a row
constexpr double kFarthest = 1e4;  // above it a float lse is too coarse for weights, exp(l * inv_t - lse)

template <class Real>
struct Stats {
  Real inv_t, lse, cut;
  int32_t tie_id;
};

// Result of one pass over a piece of a row: its peak for greedy rows, else the unit exp(exponent) of its block sums.
template <class Real>
struct Piece {
  Peak<Real> peak;
  double exponent;
};

template <class Real>
Piece<Real> scan(const Matrix& logits, int64_t row, int64_t first, int64_t count, Real inv_t, double* sums) {
  const void* p = logits.at(row, first);
  if (inv_t != 0) return {{}, rows::masses(logits.type, p, count, inv_t, sums)};
  Peak<Real> peak = rows::peak(logits.type, p, count, inv_t);
  peak.id += static_cast<int32_t>(first);
  return {peak, 0};
}

// Rescales the block sums of a row's pieces to one unit. Returns the row's peak, or that unit.
template <class Real>
Piece<Real> merge(const Piece<Real>* parts, int64_t pieces, int64_t blocks, double* sums) {
  constexpr int64_t kEach = kChunk / kVocabBlock;
  Piece<Real> whole = parts[0];
  for (int64_t i = 1; i < pieces; ++i) {
    const bool nan = whole.peak.nan || parts[i].peak.nan;
    if (parts[i].peak.logit > whole.peak.logit) whole.peak = parts[i].peak;  // ties: the earlier piece has the lower id
    whole.peak.nan = nan;
    whole.exponent = std::max(whole.exponent, parts[i].exponent);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const double up = parts[b / kEach].exponent - whole.exponent;
    if (up != 0) sums[b] *= std::exp(up);
  }
  return whole;
}

double sum_of(const double* sums, int64_t blocks) {
  double part[8] = {};
  int64_t b = 0;
  for (; b + 8 <= blocks; b += 8)
    for (int k = 0; k < 8; ++k) part[k] += sums[b + k];
  for (; b < blocks; ++b) part[0] += sums[b];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <class Real>
Stats<Real> plain_row(const Piece<Real>& whole, double total, Real inv_t, int64_t vocab) {
  constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();
  if (inv_t == 0) {
    if (whole.peak.nan || !std::isfinite(whole.peak.logit)) return {0, nan, nan, 0};
    return {0, 0, whole.peak.logit, whole.peak.id};
  }
  const Real lse = static_cast<Real>(whole.exponent + std::log(total));
  if (!std::isfinite(lse)) return {inv_t, nan, nan, 0};
  return {inv_t, lse, static_cast<Real>(-kInfinity), static_cast<int32_t>(vocab - 1)};
}

template <class Real>
struct Results {
  Real *inv_t, *lse, *cut;
  int32_t* tie_id;
  Real* mass;
};

template <class Real>
void all_rows(const Matrix& logits, const SamplingRows& sampling, const Results<Real>& out, bool alone = false) {
  const int64_t rows = logits.rows, vocab = logits.columns, blocks = block_count(vocab);
  auto inverse = [&](int64_t r) {
    return sampling.temperature[r] == 0 ? Real{0} : Real{1} / static_cast<Real>(sampling.temperature[r]);
  };
  auto finish = [&](int64_t r, const Piece<Real>& whole, const double* sums) {
    const double total = inverse(r) != 0 ? sum_of(sums, blocks) : 0.0;
    Stats<Real> found = plain_row(whole, total, inverse(r), vocab);
    const int64_t top_k = sampling.top_k[r] < vocab ? sampling.top_k[r] : 0;
    const bool has_dist = found.lse == found.lse;
    const bool filtered = top_k > 0 || sampling.top_p[r] < 1 || sampling.min_p[r] > 0;
    if (found.inv_t != 0 && has_dist && filtered) {
      const Nucleus<Real> kept = select_nucleus<Real>(logits.type, logits.at(r, 0), vocab, found.inv_t, top_k,
                                                      sampling.top_p[r], sampling.min_p[r]);
      found.lse = kept.lse;
      found.cut = kept.cut;
      found.tie_id = found.cut == static_cast<Real>(-kInfinity) ? static_cast<int32_t>(vocab - 1) : kept.tie_id;
    }
    out.inv_t[r] = found.inv_t;
    out.lse[r] = found.lse;
    out.cut[r] = found.cut;
    out.tie_id[r] = found.tie_id;
    if (out.mass == nullptr) return;
    const bool known = found.inv_t != 0 && has_dist && !filtered && std::fabs(found.lse) < kFarthest;
    // in units of the rounded normaliser, like the weights
    const double share = known ? std::exp(whole.exponent - static_cast<double>(found.lse)) : std::nan("");
    for (int64_t b = 0; b < blocks; ++b) out.mass[r * blocks + b] = static_cast<Real>(known ? sums[b] * share : share);
  };
  const int64_t pieces = (vocab + kChunk - 1) / kChunk;
  if (alone || pieces == 1 || thread_count() == 1 || rows * vocab <= kGrain || rows >= 4 * thread_count()) {
    parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      std::vector<double> sums(blocks);
      for (int64_t r = begin; r < end; ++r) {
        const Piece<Real> whole = scan(logits, r, 0, vocab, inverse(r), sums.data());
        finish(r, whole, sums.data());
      }
    });
    return;
  }
  std::vector<Piece<Real>> parts(rows * pieces);
  std::vector<double> sums(rows * blocks);
  parallel_for(0, rows * pieces, kGrain / kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * kChunk;
      parts[i] = scan(logits, row, first, std::min(kChunk, vocab - first), inverse(row),
                      &sums[row * blocks + first / kVocabBlock]);
    }
  });
  bool filtered = false;
  for (int64_t r = 0; r < rows; ++r)
    filtered |= sampling.top_k[r] > 0 || sampling.top_p[r] < 1 || sampling.min_p[r] > 0;
  parallel_for(0, rows, filtered ? 1 : rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double* own = &sums[r * blocks];
      const Piece<Real> whole = merge(&parts[r * pieces], pieces, inverse(r) != 0 ? blocks : 0, own);
      finish(r, whole, own);
    }
  });
}

}  // namespace

const char* invalid_parameter(const SamplingRows& sampling, int64_t rows, int64_t* row) {
  for (int64_t r = 0; r < rows; ++r) {
    *row = r;
    const float t = sampling.temperature[r];
    if (!(t == 0 || (t >= 1e-6f && t < std::numeric_limits<float>::infinity()))) return "temperature";
    if (sampling.top_k[r] < 0) return "top_k";
    if (!(sampling.top_p[r] > 0 && sampling.top_p[r] <= 1)) return "top_p";
    if (!(sampling.min_p[r] >= 0 && sampling.min_p[r] <= 1)) return "min_p";
  }
  return nullptr;
}

void distribution_stats(const Matrix& logits, const SamplingRows& sampling, void* inv_t, void* lse, void* cut, int32_t* tie_id,
               void* mass) {
  auto run = [&](auto real) {
    using Real = decltype(real);
    all_rows<Real>(logits, sampling,
                   {static_cast<Real*>(inv_t), static_cast<Real*>(lse), static_cast<Real*>(cut), tie_id,
                    static_cast<Real*>(mass)});
  };
  if (logits.type == Scalar::Float64)
    run(double{});
  else
    run(float{});
}

namespace {

template <class Real>
void compute_stats_as(const LazyStats& lazy, int64_t r, bool alone) {
  Real* const lse = static_cast<Real*>(lazy.lse) + r;
  if (*lse != static_cast<Real>(kInfinity)) return;
  Matrix row = lazy.logits;
  row.data = lazy.logits.at(r, 0);
  row.rows = 1;
  const SamplingRows& all = lazy.sampling;
  const int64_t blocks = block_count(row.columns);
  all_rows<Real>(row, {all.temperature + r, all.top_k + r, all.top_p + r, all.min_p + r},
                 {static_cast<Real*>(lazy.inv_t) + r, lse, static_cast<Real*>(lazy.cut) + r, lazy.tie_id + r,
                  static_cast<Real*>(lazy.mass) + r * blocks},
                 alone);
}

}  // namespace

void compute_stats(const LazyStats& lazy, int64_t row, bool alone) {
  lazy.logits.type == Scalar::Float64 ? compute_stats_as<double>(lazy, row, alone) : compute_stats_as<float>(lazy, row, alone);
}

namespace {

// Whether a row is not computed yet and a rough total can bound its distribution.
bool rough(const LazyStats& lazy, int64_t row) {
  const SamplingRows& sampling = lazy.sampling;
  const bool filtered = sampling.top_k[row] > 0 || sampling.top_p[row] < 1 || sampling.min_p[row] > 0;
  if (lazy.logits.type == Scalar::Float64 || filtered || sampling.temperature[row] == 0) return false;
  return static_cast<const float*>(lazy.lse)[row] == static_cast<float>(kInfinity);
}

}  // namespace

double rough_inverse(const LazyStats& lazy, int64_t row, int64_t token, double enough) {
  if (!rough(lazy, row)) return std::nan("");
  const Matrix& logits = lazy.logits;
  const SamplingRows& sampling = lazy.sampling;
  const float logit = static_cast<float>(logits.logit(row, token)), inv_t = 1.0f / sampling.temperature[row];
  return rows::rough_total(logits.type, logits.at(row, 0), logits.columns, inv_t, logit, enough);
}

bool rough_dist(const LazyStats& lazy, int64_t row, DistributionRow<float>* dist, double* masses) {
  if (!rough(lazy, row)) return false;
  const Matrix& logits = lazy.logits;
  const float inv_t = 1.0f / lazy.sampling.temperature[row];
  float top = 0;
  const double total = rows::rough_masses(logits.type, logits.at(row, 0), logits.columns, inv_t, masses, &top);
  const double lse = static_cast<double>(top) * inv_t + std::log(total);
  if (!(std::fabs(lse) < kFarthest)) return false;
  *dist = {inv_t, static_cast<float>(lse), static_cast<float>(-kInfinity), static_cast<int32_t>(logits.columns - 1)};
  const double unit = std::exp(static_cast<double>(top) * inv_t - static_cast<double>(dist->lse));
  for (int64_t b = 0; b < block_count(logits.columns); ++b) masses[b] *= unit;
  return true;
}

void mark_uncomputed(const LazyStats& lazy, int64_t first, int64_t count) {
  std::fill_n(lazy.tie_id + first, count, 0);
  auto fill = [&](auto real) {
    using Real = decltype(real);
    const int64_t blocks = block_count(lazy.logits.columns);
    std::fill_n(static_cast<Real*>(lazy.lse) + first, count, static_cast<Real>(kInfinity));
    std::fill_n(static_cast<Real*>(lazy.inv_t) + first, count, Real{0});
    std::fill_n(static_cast<Real*>(lazy.cut) + first, count, Real{0});
    std::fill_n(static_cast<Real*>(lazy.mass) + first * blocks, count * blocks, std::numeric_limits<Real>::quiet_NaN());
  };
  if (lazy.logits.type == Scalar::Float64)
    fill(double{});
  else
    fill(float{});
}

}  // namespace specdec

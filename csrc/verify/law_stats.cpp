#include "verify/law_stats.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "verify/nucleus.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.6931471805599453;
constexpr int64_t kChunk = 32768;  // logits per piece when a row is shared among threads

struct Sampling {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

template <class Real>
struct Stats {
  Real inv_t, lse, cut;
  int32_t tie_id;
};

// What one pass over a piece of a row leaves: greedy rows need its peak, the others log2 of its mass.
template <class Real>
struct Piece {
  Peak<Real> peak;
  double log2_sum;
};

template <class Real>
Piece<Real> scan(const Matrix& logits, int64_t row, int64_t first, int64_t count, Real inv_t) {
  const void* p = logits.at(row, first);
  if (inv_t != 0) return {{}, rows::mass(logits.type, p, count, inv_t)};
  Peak<Real> peak = rows::peak(logits.type, p, count, inv_t);
  peak.id += static_cast<int32_t>(first);
  return {peak, 0};
}

template <class Real>
Piece<Real> merge(const Piece<Real>& a, const Piece<Real>& b) {
  Piece<Real> out = b.peak.level > a.peak.level ? b : a;  // ties: the earlier piece has the lower id
  out.peak.nan = a.peak.nan || b.peak.nan;
  const double high = std::max(a.log2_sum, b.log2_sum), low = std::min(a.log2_sum, b.log2_sum);
  const bool nan = a.log2_sum != a.log2_sum || b.log2_sum != b.log2_sum;
  out.log2_sum = nan ? std::nan("") : low == -kInfinity ? high : high + std::log2(1 + std::exp2(low - high));
  return out;
}

template <class Real>
Stats<Real> plain_row(const Piece<Real>& whole, Real inv_t, int64_t vocab) {
  constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();
  if (inv_t == 0) {
    if (whole.peak.nan || !std::isfinite(whole.peak.level)) return {0, nan, nan, 0};
    return {0, 0, whole.peak.level, whole.peak.id};
  }
  const Real lse = static_cast<Real>(whole.log2_sum * kLn2);
  if (!std::isfinite(lse)) return {inv_t, nan, nan, 0};
  return {inv_t, lse, static_cast<Real>(-kInfinity), static_cast<int32_t>(vocab - 1)};
}

template <class Real>
void all_rows(const Matrix& logits, const SamplingRows& sampling, Real* inv_t, Real* lse, Real* cut, int32_t* tie_id) {
  const int64_t rows = logits.rows, vocab = logits.columns;
  auto sampling_of = [&](int64_t r) {
    return Sampling{sampling.temperature[r], sampling.top_k[r], sampling.top_p[r], sampling.min_p[r]};
  };
  auto inverse = [&](int64_t r) {
    return sampling.temperature[r] == 0 ? Real{0} : Real{1} / static_cast<Real>(sampling.temperature[r]);
  };
  auto finish = [&](int64_t r, const Piece<Real>& whole) {
    const Sampling s = sampling_of(r);
    Stats<Real> out = plain_row(whole, inverse(r), vocab);
    const bool top_k = s.top_k > 0 && s.top_k < vocab;
    if (out.inv_t != 0 && out.lse == out.lse && (top_k || s.top_p < 1 || s.min_p > 0)) {
      const Nucleus<Real> kept = select_nucleus<Real>(logits.type, logits.at(r, 0), vocab, out.inv_t,
                                                      top_k ? s.top_k : 0, s.top_p, s.min_p);
      out.lse = kept.lse;
      out.cut = kept.cut;
      out.tie_id = out.cut == static_cast<Real>(-kInfinity) ? static_cast<int32_t>(vocab - 1) : kept.tie_id;
    }
    inv_t[r] = out.inv_t;
    lse[r] = out.lse;
    cut[r] = out.cut;
    tie_id[r] = out.tie_id;
  };
  const int64_t pieces = (vocab + kChunk - 1) / kChunk;
  if (pieces == 1 || rows * vocab <= kGrain || rows >= 4 * thread_count()) {
    parallel_for(0, rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) finish(r, scan(logits, r, 0, vocab, inverse(r)));
    });
    return;
  }
  std::vector<Piece<Real>> parts(rows * pieces);
  parallel_for(0, rows * pieces, kGrain / kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * kChunk;
      parts[i] = scan(logits, row, first, std::min(kChunk, vocab - first), inverse(row));
    }
  });
  bool filtered = false;
  for (int64_t r = 0; r < rows; ++r)
    filtered |= sampling.top_k[r] > 0 || sampling.top_p[r] < 1 || sampling.min_p[r] > 0;
  parallel_for(0, rows, filtered ? 1 : rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Piece<Real> whole = parts[r * pieces];
      for (int64_t i = 1; i < pieces; ++i) whole = merge(whole, parts[r * pieces + i]);
      finish(r, whole);
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

void law_stats(const Matrix& logits, const SamplingRows& sampling, void* inv_t, void* lse, void* cut, int32_t* tie_id) {
  if (logits.type == Scalar::Float64)
    all_rows(logits, sampling, static_cast<double*>(inv_t), static_cast<double*>(lse), static_cast<double*>(cut), tie_id);
  else
    all_rows(logits, sampling, static_cast<float*>(inv_t), static_cast<float*>(lse), static_cast<float*>(cut), tie_id);
}

}  // namespace specdec

#include "verify/nucleus.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

namespace specdec {
namespace {

template <class Real>
struct Candidate {
  Real level;
  int32_t id;
  double mass;  // exp(level * inv_t - top * inv_t)
};

template <class A, class B>
bool precedes(const A& a, const B& b) {
  return a.level > b.level || (a.level == b.level && a.id < b.id);
}

// Monotone maps between floating-point numbers and integers (-0.0 just below 0.0).
template <class Real>
using Key = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
template <class Real>
Key<Real> key_of(Real value) {
  Key<Real> bits;
  std::memcpy(&bits, &value, sizeof value);
  return bits >= 0 ? bits : static_cast<Key<Real>>(std::numeric_limits<Key<Real>>::min() - bits);
}
template <class Real>
Real value_of(Key<Real> key) {
  if (key < 0) key = static_cast<Key<Real>>(std::numeric_limits<Key<Real>>::min() - key);
  Real value;
  std::memcpy(&value, &key, sizeof value);
  return value;
}

template <class Real>
double relative_mass(Real level, Real inv_t, double top_scaled) {
  const Real scaled = level * inv_t;
  return std::exp(static_cast<double>(scaled) - top_scaled);
}

// Smallest level that min-p keeps: bisection on the representable numbers, with the very test of the definition.
template <class Real>
Real smallest_kept(Real top, Real inv_t, double top_scaled, float min_p) {
  // 64-bit arithmetic on keys may overflow for Real = double, so halve before adding
  Key<Real> low = key_of(std::numeric_limits<Real>::lowest()), high = key_of(top);
  if (relative_mass(value_of<Real>(low), inv_t, top_scaled) >= min_p) return value_of<Real>(low);
  while (true) {  // invariant: high is kept, low is not
    const Key<Real> middle = low / 2 + high / 2 + (low % 2 + high % 2) / 2;
    if (middle == low || middle == high) return value_of<Real>(high);
    (relative_mass(value_of<Real>(middle), inv_t, top_scaled) >= min_p ? high : low) = middle;
  }
}

// A level that at least k elements reach: the k-th largest of the maxima of small pieces.
template <class Real>
Real top_k_bound(Scalar type, const void* row, int64_t vocab, int64_t k, std::vector<Real>& maxima) {
  int64_t piece = 1024;
  while (piece > 32 && vocab / piece < 4 * k) piece /= 2;
  const int64_t count = vocab / piece;
  if (count < k) return -std::numeric_limits<Real>::infinity();
  const int64_t bytes = type == Scalar::Float64 ? 8 : type == Scalar::Float32 ? 4 : 2;
  maxima.resize(count);
  for (int64_t i = 0; i < count; ++i)
    maxima[i] = rows::largest(type, static_cast<const char*>(row) + i * piece * bytes, piece, Real{});
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<Real>());
  return maxima[k - 1];
}

// Reorders candidates so that the kept ones (mass strictly before them < target) come first; returns how many.
template <class Real>
int64_t nucleus_size(Candidate<Real>* c, int64_t count, double target) {
  int64_t low = 0, high = count;
  double before = 0;  // mass of [0, low), all kept
  while (high - low > 24) {
    Candidate<Real>*a = c + low, *b = c + (low + high) / 2, *d = c + high - 1;
    if (precedes(*b, *a)) std::swap(*a, *b);
    if (precedes(*d, *b)) {
      std::swap(*b, *d);
      if (precedes(*b, *a)) std::swap(*a, *b);
    }
    const Candidate<Real> pivot = *b;
    std::swap(*b, *d);
    int64_t split = low;
    double mass = 0;
    for (int64_t i = low; i < high - 1; ++i)
      if (precedes(c[i], pivot)) {
        mass += c[i].mass;
        std::swap(c[i], c[split++]);
      }
    std::swap(c[split], c[high - 1]);  // the pivot
    if (before + mass >= target) {
      high = split;
    } else {
      before += mass + pivot.mass;
      low = split + 1;
    }
  }
  std::sort(c + low, c + high, precedes<Candidate<Real>, Candidate<Real>>);
  while (low < high && before < target) before += c[low++].mass;
  return low;
}

}  // namespace

template <class Real>
Nucleus<Real> select_nucleus(Scalar type, const void* row, int64_t vocab, Real inv_t, int64_t top_k, float top_p,
                             float min_p) {
  const Real top = rows::largest(type, row, vocab, Real{});
  static thread_local std::vector<Entry<Real>> found;
  static thread_local std::vector<Candidate<Real>> candidates;
  static thread_local std::vector<Real> maxima;
  const double top_scaled = static_cast<Real>(top * inv_t);
  Real bound = -std::numeric_limits<Real>::infinity();
  double target = std::numeric_limits<double>::infinity();
  if (top_k > 0) {
    bound = top_k_bound(type, row, vocab, top_k, maxima);
  } else if (top_p < 1) {
    // Tokens of relative mass m have together at most vocab * m, so those below the bound weigh at most half of what
    // top-p leaves out: the nucleus lies above the bound.
    const double total = rows::mass64(type, row, vocab, inv_t, top_scaled);
    target = static_cast<double>(top_p) * total;
    const double depth = std::log(0.5 * (1 - static_cast<double>(top_p)) * total / static_cast<double>(vocab));
    bound = static_cast<Real>(top + (depth * 1.0001 - 1e-3) / inv_t - 1e-6 * std::fabs(static_cast<double>(top)));
  }
  Real lowest = bound;
  if (min_p > 0) {
    lowest = smallest_kept(top, inv_t, top_scaled, min_p);
    // top-p after top-k weighs the whole top-k, min-p or not
    if (!(top_k > 0 && top_p < 1)) bound = std::max(bound, lowest);
  }

  if (found.size() < static_cast<size_t>(vocab)) found.resize(vocab);
  int64_t count = rows::collect(type, row, vocab, bound, found.data());
  if (top_k > 0 && count > top_k) {
    std::nth_element(found.begin(), found.begin() + (top_k - 1), found.begin() + count,
                     precedes<Entry<Real>, Entry<Real>>);
    count = top_k;
  }
  if (candidates.size() < static_cast<size_t>(count)) candidates.resize(count);
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    candidates[i] = {found[i].level, found[i].id, relative_mass(found[i].level, inv_t, top_scaled)};
    total += candidates[i].mass;
  }
  if (top_p < 1) count = nucleus_size(candidates.data(), count, top_k > 0 ? top_p * total : target);

  double kept = 0;
  Nucleus<Real> out{0, std::numeric_limits<Real>::infinity(), 0};
  for (int64_t i = 0; i < count; ++i) {
    const Candidate<Real>& c = candidates[i];
    if (min_p > 0 && c.level < lowest) continue;
    kept += c.mass;
    if (c.level < out.cut)
      out.cut = c.level, out.tie_id = c.id;
    else if (c.level == out.cut)
      out.tie_id = std::max(out.tie_id, c.id);
  }
  out.lse = static_cast<Real>(top_scaled + std::log(kept));
  return out;
}

template Nucleus<float> select_nucleus(Scalar, const void*, int64_t, float, int64_t, float, float);
template Nucleus<double> select_nucleus(Scalar, const void*, int64_t, double, int64_t, float, float);

}  // namespace specdec

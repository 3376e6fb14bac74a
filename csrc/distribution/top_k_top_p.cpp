#include "distribution/top_k_top_p.h"

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
struct Contender {
  Real logit;
  int32_t id;
  double mass;  // exp(logit * inv_t - top * inv_t)
};

template <class A, class B>
bool precedes(const A& a, const B& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
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
double relative_mass(Real logit, Real inv_t, double top_scaled) {
  const Real scaled = logit * inv_t;
  return std::exp(static_cast<double>(scaled) - top_scaled);
}

// Smallest logit that min-p keeps, by bisection over the representable numbers with the test of the definition.
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

// A lower bound of the k-th largest logit: the k-th largest of the maxima of small pieces.
template <class Real>
Real top_k_bound(Scalar type, const void* row, int64_t vocab, int64_t k) {
  static thread_local std::vector<Real> maxima;
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

// Moves the kept contenders (mass strictly before them < target) to the front and returns their number. `before` is the
// mass of the elements that precede all contenders.
template <class Real>
int64_t nucleus_size(Contender<Real>* c, int64_t count, double before, double target) {
  int64_t low = 0, high = count;  // [0, low) is kept; `before` includes its mass
  while (high - low > 24) {
    Contender<Real>*a = c + low, *b = c + (low + high) / 2, *d = c + high - 1;
    if (precedes(*b, *a)) std::swap(*a, *b);
    if (precedes(*d, *b)) {
      std::swap(*b, *d);
      if (precedes(*b, *a)) std::swap(*a, *b);
    }
    const Contender<Real> pivot = *b;
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
  std::sort(c + low, c + high, precedes<Contender<Real>, Contender<Real>>);
  while (low < high && before < target) before += c[low++].mass;
  return low;
}

constexpr int64_t kFew = 4096;  // a window with at most this many contenders goes to the quickselect

// One row [V] and a window [low, high] of logits. All elements above `high` are kept.
template <class Real>
class Selection {
 public:
  Selection(Scalar type, const void* row, int64_t vocab, Real inv_t)
      : type_(type), row_(row), vocab_(vocab), inv_t_(inv_t) {
    top_ = rows::largest(type, row, vocab, Real{});
    top_scaled_ = static_cast<Real>(top_ * inv_t);
    open(-std::numeric_limits<Real>::infinity());
  }

  Real top() const { return top_; }
  double top_scaled() const { return top_scaled_; }
  Real high() const { return high_; }
  double mass_above() const { return mass_above_; }
  double total() const { return rows::mass64(type_, row_, vocab_, inv_t_, top_scaled_, lowest_logit()); }
  std::vector<Contender<Real>>& contenders() { return contenders_; }

  void by_logit(Real logit) {
    open(logit);
    gather(vocab_);
  }
  // Reduces the contenders to the kept ones among the k largest elements. The k-th must be at least `bound`.
  void by_count(int64_t k, Real bound) {
    open(bound);
    locate(false, static_cast<double>(k));
    k -= count_above_;
    if (k < static_cast<int64_t>(contenders_.size())) {
      std::nth_element(contenders_.begin(), contenders_.begin() + (k - 1), contenders_.end(),
                       precedes<Contender<Real>, Contender<Real>>);
      contenders_.resize(k);
    }
  }
  // Reduces the contenders to elements with less than `target` mass before them and at least `bound`.
  void by_mass(double target, Real bound) {
    open(bound);
    locate(true, target);
    prune(target);
  }
  void prune(double target) {
    contenders_.resize(nucleus_size(contenders_.data(), static_cast<int64_t>(contenders_.size()), mass_above_, target));
  }

 private:
  static constexpr Real lowest_logit() { return -std::numeric_limits<Real>::infinity(); }

  void open(Real low) {
    low_ = low;
    high_ = top_;
    count_above_ = 0;
    mass_above_ = 0;
  }

  // False if the window has more than `limit` elements.
  bool gather(int64_t limit) {
    static thread_local std::vector<Entry<Real>> found;
    const size_t space = static_cast<size_t>(std::min(limit, vocab_)) + rows::kCollectSlack;
    if (found.size() < space) found.resize(space);
    const int64_t count = rows::collect(type_, row_, vocab_, low_, high_, limit, found.data());
    if (count > limit) return false;
    contenders_.resize(count);
    for (int64_t i = 0; i < count; ++i)
      contenders_[i] = {found[i].logit, found[i].id, relative_mass(found[i].logit, inv_t_, top_scaled_)};
    return true;
  }

  void locate(bool by_mass, double target) {
    for (int round = 0; round < 6 && !gather(kFew); ++round)
      if (!narrow(by_mass, target)) break;
    if (high_ < top_) mass_above_ = rows::mass64(type_, row_, vocab_, inv_t_, top_scaled_, high_);
    gather(vocab_);
  }

  // Shrinks the window to about a ninth, or to finite bounds. False if it did not shrink.
  bool narrow(bool by_mass, double target) {
    Real edges[kEdges];
    double masses[kEdges] = {};
    int64_t counts[kEdges];
    const Real unit = (std::fabs(high_) + 1) / 256;
    for (int i = 0; i < kEdges; ++i)
      edges[i] = low_ < Real(-1e30) ? high_ - unit * std::pow(Real(4), Real(kEdges - 1 - i))
                                    : low_ + (high_ - low_) * (Real(i + 1) / (kEdges + 1));
    rows::above(type_, row_, vocab_, inv_t_, top_, edges, by_mass ? masses : nullptr, counts);
    // Masses are float sums here, so decisions keep a distance from the target.
    const double slack = by_mass ? 1e-4 * target : 0;
    const Real before_low = low_, before_high = high_;
    for (int i = 0; i < kEdges; ++i) {
      const double above = by_mass ? masses[i] : static_cast<double>(counts[i]);
      if (above - slack >= target) {
        low_ = std::max(low_, edges[i]);
      } else if (above + slack < target) {
        high_ = edges[i];
        count_above_ = counts[i];
        break;
      }
    }
    return low_ > before_low || high_ < before_high;
  }

  Scalar type_;
  const void* row_;
  int64_t vocab_;
  Real inv_t_, top_;
  double top_scaled_;
  Real low_, high_;
  int64_t count_above_;
  double mass_above_;
  std::vector<Contender<Real>> contenders_;
};

}  // namespace

template <class Real>
Nucleus<Real> select_nucleus(Scalar type, const void* row, int64_t vocab, Real inv_t, int64_t top_k, float top_p,
                             float min_p) {
  Selection<Real> selection(type, row, vocab, inv_t);
  const Real top = selection.top();
  const double top_scaled = selection.top_scaled();
  const Real lowest = min_p > 0 ? smallest_kept(top, inv_t, top_scaled, min_p) : -std::numeric_limits<Real>::infinity();
  if (top_k > 0) {
    selection.by_count(top_k, top_k_bound<Real>(type, row, vocab, top_k));
    if (top_p < 1) {
      double total = selection.mass_above();
      for (const Contender<Real>& c : selection.contenders()) total += c.mass;
      if (selection.mass_above() < top_p * total)
        selection.prune(top_p * total);
      else
        selection.by_mass(top_p * total, -std::numeric_limits<Real>::infinity());
    }
  } else if (top_p < 1) {
    // Tokens below relative mass m have a total of at most vocab * m. Below this bound it is at most half of the mass that
    // top-p removes, so the nucleus is above the bound.
    const double total = selection.total();
    const double depth = std::log(0.5 * (1 - static_cast<double>(top_p)) * total / static_cast<double>(vocab));
    selection.by_mass(top_p * total, static_cast<Real>(top + (depth * 1.0001 - 1e-3) / inv_t -
                                                       1e-6 * std::fabs(static_cast<double>(top))));
  }
  // Everything above the window is kept so far, so a min-p cut there decides alone.
  if ((top_k == 0 && top_p == 1) || (min_p > 0 && lowest > selection.high())) selection.by_logit(lowest);

  double kept = selection.mass_above();
  Nucleus<Real> out{0, std::numeric_limits<Real>::infinity(), 0};
  for (const Contender<Real>& c : selection.contenders()) {
    if (c.logit < lowest) continue;
    kept += c.mass;
    if (c.logit < out.cut)
      out.cut = c.logit, out.tie_id = c.id;
    else if (c.logit == out.cut)
      out.tie_id = std::max(out.tie_id, c.id);
  }
  out.lse = static_cast<Real>(top_scaled + std::log(kept));
  return out;
}

template Nucleus<float> select_nucleus(Scalar, const void*, int64_t, float, int64_t, float, float);
template Nucleus<double> select_nucleus(Scalar, const void*, int64_t, double, int64_t, float, float);

}  // namespace specdec

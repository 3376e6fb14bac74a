#include "verify/expand.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

constexpr int64_t kGroups = 32;  // of tokens, whose largest levels bound the worst child from below

template <class Real>
constexpr Scalar kTypeOf = sizeof(Real) == 8 ? Scalar::Float64 : Scalar::Float32;

template <class Real>
struct Scratch {
  std::unique_ptr<Real[]> level;
  std::unique_ptr<float[]> noise;
  std::unique_ptr<Entry<Real>[]> children;
  std::vector<double> sums;
  explicit Scratch(int64_t vocab)
      : level(new Real[vocab]), noise(new float[vocab]), children(new Entry<Real>[vocab + rows::kCollectSlack]),
        sums(block_count(vocab)) {}
};

// level = l * inv_t, plus noise, of the tokens that the law keeps; -inf elsewhere.
template <class Real>
void fill(const Laws& laws, int64_t r, const LawRow<Real>& law, const float* noise, Real* level) {
  const int64_t vocab = laws.logits.columns;
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  with_scalar(laws.logits.type, [&](auto element) {
    using T = decltype(element);
    const T* row = static_cast<const T*>(laws.logits.at(r, 0));
    const Real inv_t = law.inv_t;
    for (int64_t v = 0; v < vocab; ++v) {
      const Real scaled = static_cast<Real>(widen(row[v])) * inv_t;
      level[v] = scaled == scaled ? scaled : none;
    }
    if (noise != nullptr)
      for (int64_t v = 0; v < vocab; ++v) level[v] = level[v] + noise[v];
    if (law.cut == none && law.tie_id == vocab - 1) return;
    for (int64_t v = 0; v < vocab; ++v)
      if (!law.keeps(static_cast<Real>(widen(row[v])), v)) level[v] = none;
  });
}

// The `width` largest levels, larger first, lower ids first among equals; returns how many there are. `best` has room for
// all: so many groups have a level of their own that is at least `low`, and few other tokens have one.
template <class Real>
int64_t largest_of(const Real* level, int64_t vocab, int64_t width, Entry<Real>* best) {
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  Real low = std::numeric_limits<Real>::lowest();
  if (width <= kGroups) {
    Real tops[kGroups];
    std::fill(tops, tops + kGroups, none);
    int64_t first = 0;
    for (; first + kGroups <= vocab; first += kGroups)
      for (int64_t g = 0; g < kGroups; ++g) tops[g] = level[first + g] > tops[g] ? level[first + g] : tops[g];
    for (int64_t g = 0; first + g < vocab; ++g) tops[g] = std::max(tops[g], level[first + g]);
    std::nth_element(tops, tops + width - 1, tops + kGroups, std::greater<Real>());
    low = std::max(low, tops[width - 1]);
  }
  const int64_t found = rows::collect(kTypeOf<Real>, level, vocab, low, -none, vocab, best);
  const int64_t count = std::min(found, width);
  std::partial_sort(best, best + count, best + found, [](const Entry<Real>& a, const Entry<Real>& b) {
    return a.level > b.level || (a.level == b.level && a.id < b.id);
  });
  return count;
}

template <class Real>
void expand_node(const Laws& laws, int64_t r, Real parent, const Counter* counter, Scratch<Real>* scratch,
                 const Children<Real>& out) {
  const int64_t vocab = laws.logits.columns, width = out.width;
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  int64_t* tokens = out.tokens + r * width;
  Real* scores = out.scores + r * width;
  std::fill(tokens, tokens + width, -1);
  std::fill(scores, scores + width, none);
  const LawRow<Real> law = laws.row<Real>(r);
  if (!(parent > none) || law.cut != law.cut) return;
  if (law.inv_t == 0) {
    tokens[0] = law.tie_id;
    scores[0] = parent;
    return;
  }
  if (counter != nullptr) row_kernels().gumbel_row(*counter, vocab, scratch->noise.get());
  Real* level = scratch->level.get();
  fill(laws, r, law, counter == nullptr ? nullptr : scratch->noise.get(), level);
  const double unit = rows::masses(kTypeOf<Real>, level, vocab, out.sharpness, scratch->sums.data());
  double total = 0;
  for (double sum : scratch->sums) total += sum;
  const Real norm = static_cast<Real>(unit + std::log(total));
  if (!std::isfinite(norm)) return;
  Entry<Real>* best = scratch->children.get();
  const int64_t count = largest_of(level, vocab, width, best);
  for (int64_t k = 0; k < count; ++k) {
    tokens[k] = best[k].id;
    scores[k] = parent + (best[k].level * out.sharpness - norm);
  }
}

// Flat indices of a tree's best children, the best first, earlier ones first among equals.
template <class Real>
void keep_best(const Children<Real>& out, int64_t row, int64_t begin, int64_t end) {
  std::vector<int32_t> order;
  for (int64_t i = begin * out.width; i < end * out.width; ++i)
    if (out.tokens[i] >= 0) order.push_back(static_cast<int32_t>(i));
  const int64_t kept = std::min<int64_t>(out.keep, static_cast<int64_t>(order.size()));
  const auto better = [&](int32_t a, int32_t b) {
    return out.scores[a] > out.scores[b] || (out.scores[a] == out.scores[b] && a < b);
  };
  std::nth_element(order.begin(), order.begin() + kept, order.end(), better);
  std::sort(order.begin(), order.begin() + kept, better);
  int32_t* best = out.best + row * out.keep;
  std::copy(order.begin(), order.begin() + kept, best);
  std::fill(best + kept, best + out.keep, -1);
}

}  // namespace

template <class Real>
void tree_expand(const Laws& laws, const int32_t* offsets, int64_t rows, const Real* parents, const int64_t* seeds,
                 const int32_t* positions, const Children<Real>& out) {
  const int64_t nodes = laws.logits.rows, vocab = laws.logits.columns;
  parallel_for(0, nodes, std::max<int64_t>(1, row_grain(vocab) / 4), [&](int64_t begin, int64_t end) {
    Scratch<Real> scratch(vocab);
    for (int64_t r = begin; r < end; ++r) {
      const bool noisy = seeds != nullptr && positions[r] >= 0;
      const Counter counter(noisy ? seeds[r] : 0, noisy ? positions[r] : 0, 0, kReplay);
      expand_node(laws, r, parents[r], noisy ? &counter : nullptr, &scratch, out);
    }
  });
  for (int64_t b = 0; b < rows; ++b) keep_best(out, b, offsets[b], offsets[b + 1]);
}

template void tree_expand(const Laws&, const int32_t*, int64_t, const float*, const int64_t*, const int32_t*,
                          const Children<float>&);
template void tree_expand(const Laws&, const int32_t*, int64_t, const double*, const int64_t*, const int32_t*,
                          const Children<double>&);

}  // namespace specdec

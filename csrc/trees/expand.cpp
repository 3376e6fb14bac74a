#include "trees/expand.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

constexpr int64_t kMostGroups = 512;  // token groups, whose maxima give a lower bound of the worst child

template <class Real>
constexpr Scalar kTypeOf = sizeof(Real) == 8 ? Scalar::Float64 : Scalar::Float32;

// Buffers of one thread, kept between calls: scaled, noise and children [V], sums [block_count(V)].
template <class Real>
struct Scratch {
  std::unique_ptr<Real[]> scaled;
  std::unique_ptr<float[]> noise;
  std::unique_ptr<Entry<Real>[]> children;
  std::vector<double> sums;
  int64_t vocab = 0, seed = 0;
  int32_t position = -1;  // with `seed`: the key of the noise in the buffer

  static Scratch& of(int64_t vocab) {
    static thread_local Scratch own;
    if (own.vocab != vocab) {
      own.vocab = 0, own.position = -1;  // in case an allocation below fails
      own.scaled.reset(new Real[vocab]);
      own.noise.reset(new float[vocab]);
      own.children.reset(new Entry<Real>[vocab + rows::kCollectSlack]);
      own.sums.resize(block_count(vocab));
      own.vocab = vocab;
    }
    return own;
  }

  // Replay noise [V] at a position, nullptr for a negative position. Nodes of one depth in one tree share it.
  const float* noise_at(int64_t seed_, int32_t position_) {
    if (position_ < 0) return nullptr;
    if (seed_ != seed || position_ != position) {
      row_kernels().gumbel_row(Counter(seed_, position_, 0, kReplay), vocab, noise.get());
      seed = seed_, position = position_;
    }
    return noise.get();
  }
};

// Writes l * inv_t plus noise for the tokens that the distribution keeps, -inf for the others. Returns whether `tops` holds
// the group maxima of the result.
template <class Real>
bool fill(const TokenDistributions& dists, int64_t r, const DistributionRow<Real>& dist, const float* noise, Real* scaled, Real* tops) {
  const int64_t vocab = dists.logits.columns;
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  rows::scaled_logits(dists.logits.type, dists.logits.at(r, 0), vocab, dist.inv_t, noise, scaled, tops);
  if (dist.cut == none && dist.tie_id == vocab - 1) return true;
  with_scalar(dists.logits.type, [&](auto element) {
    using T = decltype(element);
    const T* row = static_cast<const T*>(dists.logits.at(r, 0));
    for (int64_t v = 0; v < vocab; ++v) scaled[v] = dist.keeps(static_cast<Real>(widen(row[v])), v) ? scaled[v] : none;
  });
  return false;
}

// The largest scaled logit of each token group.
template <class Real>
void group(const Real* scaled, int64_t vocab, int64_t groups, Real* tops) {
  std::fill(tops, tops + groups, -std::numeric_limits<Real>::infinity());
  int64_t first = 0;
  for (; first + groups <= vocab; first += groups)
    for (int64_t g = 0; g < groups; ++g) tops[g] = scaled[first + g] > tops[g] ? scaled[first + g] : tops[g];
  for (int64_t g = 0; first + g < vocab; ++g) tops[g] = std::max(tops[g], scaled[first + g]);
}

// Writes the `width` largest scaled logits to `best` [V + kCollectSlack], larger first, lower ids first among equals.
// Returns their number. `width` groups have a maximum of at least `low`, so `low` excludes most other tokens. tops: the
// maxima of kTops groups if `grouped`; overwritten.
template <class Real>
int64_t largest_of(const Real* scaled, int64_t vocab, int64_t width, bool grouped, Real* tops, Entry<Real>* best) {
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  Real low = std::numeric_limits<Real>::lowest();
  if (width <= kMostGroups / 2) {
    int64_t groups = kTops;
    while (groups < 2 * width) groups *= 2;
    if (!grouped || groups > kTops) group(scaled, vocab, groups, tops);
    std::nth_element(tops, tops + width - 1, tops + groups, std::greater<Real>());
    low = std::max(low, tops[width - 1]);
  }
  const int64_t found = rows::collect(kTypeOf<Real>, scaled, vocab, low, -none, vocab, best);
  const int64_t count = std::min(found, width);
  std::partial_sort(best, best + count, best + found, [](const Entry<Real>& a, const Entry<Real>& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
  return count;
}

template <class Real>
void expand_node(const TokenDistributions& dists, int64_t r, Real parent, int64_t seed, int32_t position, Scratch<Real>* scratch,
                 const Children<Real>& out) {
  const int64_t vocab = dists.logits.columns, width = out.width;
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  int64_t* tokens = out.tokens + r * width;
  Real* scores = out.scores + r * width;
  std::fill(tokens, tokens + width, -1);
  std::fill(scores, scores + width, none);
  const DistributionRow<Real> dist = dists.row<Real>(r);
  if (!(parent > none) || dist.cut != dist.cut) return;
  if (dist.inv_t == 0) {
    tokens[0] = dist.tie_id;
    scores[0] = parent;
    return;
  }
  Real* scaled = scratch->scaled.get();
  alignas(64) Real tops[kMostGroups];
  const bool grouped = fill(dists, r, dist, scratch->noise_at(seed, position), scaled, tops);
  const double unit = rows::masses(kTypeOf<Real>, scaled, vocab, out.sharpness, scratch->sums.data());
  double total = 0;
  for (double sum : scratch->sums) total += sum;
  const Real norm = static_cast<Real>(unit + std::log(total));
  if (!std::isfinite(norm)) return;
  Entry<Real>* best = scratch->children.get();
  const int64_t count = largest_of(scaled, vocab, width, grouped, tops, best);
  for (int64_t k = 0; k < count; ++k) {
    tokens[k] = best[k].id;
    scores[k] = parent + std::min(best[k].logit * out.sharpness - norm, Real(0));
  }
}

// Flat indices of a tree's best children, best first, lower indices first among equals.
template <class Real>
void keep_best(const Children<Real>& out, int64_t row, int64_t begin, int64_t end) {
  std::vector<int32_t> order;
  order.reserve((end - begin) * out.width);
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

// Numbers the final nodes of a tree: its best columns, lower columns first among equals. Returns their number, including
// the root.
template <class Real>
int32_t number_best(const Growth<Real>& growth, const Real* scores, int32_t limit, int32_t* nodes) {
  constexpr Real none = -std::numeric_limits<Real>::infinity();
  std::vector<int32_t> order;
  for (int64_t c = 1; c < growth.columns; ++c)
    if (scores[c] > none) order.push_back(static_cast<int32_t>(c));
  const int64_t kept = std::min<int64_t>(std::max(limit, 0), static_cast<int64_t>(order.size()));
  std::nth_element(order.begin(), order.begin() + kept, order.end(), [&](int32_t a, int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  std::fill(nodes + 1, nodes + growth.columns, -1);
  for (int64_t k = 0; k < kept; ++k) nodes[order[k]] = 0;
  int32_t count = 1;
  for (int64_t c = 1; c < growth.columns; ++c)
    if (nodes[c] == 0) nodes[c] = count++;
  return count;
}

// Numbers the best columns of a level's block, as long as their descendants may still belong to the tree. Returns the
// number of the tree's nodes, or 0 if the tree stops growing.
template <class Real>
int32_t number_next(const Growth<Real>& growth, const Real* scores, int32_t limit, int32_t* nodes) {
  const int64_t block = growth.block();
  int32_t count = 0;
  for (int64_t c = 0; c < block; ++c) count += nodes[c] >= 0;
  const int32_t before = count;
  for (int64_t k = 0; k < growth.reach; ++k) {
    const Real own = scores[block + k];
    if (!(own > -std::numeric_limits<Real>::infinity())) break;
    int32_t as_good = 0;
    for (int64_t c = 1; c < block + growth.keep; ++c) as_good += scores[c] >= own;
    if (as_good >= limit) break;
    nodes[block + k] = count++;
  }
  return count > before ? count : 0;
}

}  // namespace

template <class Real>
void tree_begin(const Growth<Real>& growth, int64_t rows) {
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t start = b * growth.columns, size = growth.columns - 1;
    growth.scores[start] = 0, growth.parents[start] = -1, growth.nodes[start] = 0;
    std::fill_n(growth.tokens + start + 1, size, -1);
    std::fill_n(growth.scores + start + 1, size, -std::numeric_limits<Real>::infinity());
    std::fill_n(growth.parents + start + 1, size, -1);
    std::fill_n(growth.nodes + start + 1, size, -1);
  }
}

template <class Real>
int64_t tree_enter(const Growth<Real>& growth, const Children<Real>& children, const int32_t* offsets, int64_t rows,
                   const PackedTrees& out) {
  const int64_t most = 1 + (growth.last ? growth.keep : (growth.level + 1) * growth.reach);
  int64_t end = 0;
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t start = b * growth.columns, block = growth.block();
    int64_t* tokens = growth.tokens + start;
    Real* scores = growth.scores + start;
    int32_t *parents = growth.parents + start, *nodes = growth.nodes + start;
    for (int64_t k = 0; k < growth.keep; ++k) {
      const int64_t child = children.best[b * growth.keep + k];
      if (child < 0) break;  // the remaining block is empty
      tokens[block + k] = children.tokens[child];
      scores[block + k] = children.scores[child];
      parents[block + k] = static_cast<int32_t>(growth.ahead() + child / children.width - offsets[b]);
    }
    const int32_t count = growth.last ? number_best(growth, scores, growth.limits[b], nodes)
                                      : number_next(growth, scores, growth.limits[b], nodes);
    if (count > most) return start;
    out.counts[b] = count;
    const int64_t first = end;
    int64_t deepest = 0;
    for (int64_t c = 0; c < (count ? growth.columns : 0); ++c) {
      if (nodes[c] < 0) continue;
      const bool unknown = c != 0 && (parents[c] < 0 || parents[c] >= c);
      if (unknown || end - first == count) return start + c;  // or a later level was already entered
      out.tokens[end] = tokens[c];
      out.parents[end++] = c == 0 ? -1 : nodes[parents[c]];
      deepest = c;
    }
    out.counts[rows + b] = static_cast<int32_t>((deepest + growth.keep - 1) / growth.keep);
  }
  std::fill(out.tokens + end, out.tokens + out.capacity, 0);
  std::fill(out.parents + end, out.parents + out.capacity, -1);
  return -1;
}

template <class Real>
void tree_expand(const TokenDistributions& dists, const int32_t* offsets, int64_t rows, const Real* parents, const int64_t* seeds,
                 const int32_t* positions, const Children<Real>& out) {
  const int64_t nodes = dists.logits.rows, vocab = dists.logits.columns;
  parallel_for(0, nodes, std::max<int64_t>(1, row_grain(vocab) / 4), [&](int64_t begin, int64_t end) {
    Scratch<Real>& scratch = Scratch<Real>::of(vocab);
    for (int64_t r = begin; r < end; ++r) {
      const bool noisy = seeds != nullptr;
      expand_node(dists, r, parents[r], noisy ? seeds[r] : 0, noisy ? positions[r] : -1, &scratch, out);
    }
  });
  for (int64_t b = 0; b < rows; ++b) keep_best(out, b, offsets[b], offsets[b + 1]);
}

template void tree_expand(const TokenDistributions&, const int32_t*, int64_t, const float*, const int64_t*, const int32_t*,
                          const Children<float>&);
template void tree_expand(const TokenDistributions&, const int32_t*, int64_t, const double*, const int64_t*, const int32_t*,
                          const Children<double>&);
#define SPECDEC_GROWTH(Real)                               \
  template void tree_begin(const Growth<Real>&, int64_t);  \
  template int64_t tree_enter(const Growth<Real>&, const Children<Real>&, const int32_t*, int64_t, const PackedTrees&);
SPECDEC_GROWTH(float)
SPECDEC_GROWTH(double)

}  // namespace specdec

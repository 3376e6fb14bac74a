// tree_expand and tree_grow.
#include "trees/expand.h"

#include <algorithm>
#include <limits>

#include "sanitize/some_distributions.h"

namespace specdec::sanitize {
namespace {

template <class Real>
void expand_once(Random& random, const TokenDistributions& dists, const Trees& trees, uint64_t seed) {
  const int64_t nodes = trees.nodes(), rows = trees.rows(), vocab = dists.logits.columns;
  const int64_t width = between(random, 1, std::min<int64_t>(vocab, 9)), keep = between(random, 1, 12);
  std::vector<Real> parents(nodes), scores(nodes * width);
  std::vector<int64_t> tokens(nodes * width), seeds(nodes, 17);
  std::vector<int32_t> positions(nodes), best(rows * keep);
  for (int64_t i = 0; i < nodes; ++i) {
    parents[i] = between(random, 0, 6) ? -Real(i) / 4 : -std::numeric_limits<Real>::infinity();
    positions[i] = static_cast<int32_t>(between(random, -2, 9));
  }
  const bool noisy = seed % 2;
  tree_expand<Real>(dists, trees.offsets.data(), rows, parents.data(), noisy ? seeds.data() : nullptr,
                    noisy ? positions.data() : nullptr, {tokens.data(), scores.data(), best.data(), width, keep, Real(seed % 3 + 1) / 2});
  for (int64_t i = 0; i < nodes * width; ++i) {
    expect(tokens[i] >= -1 && tokens[i] < vocab, "a child", seed);
    expect(i % width == 0 || !(scores[i] > scores[i - 1]), "the order of children", seed);
  }
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t k = 0; k < keep; ++k) {
      const int64_t at = best[b * keep + k];
      expect(at == -1 || (at >= trees.offsets[b] * width && at < trees.offsets[b + 1] * width && tokens[at] >= 0),
             "a child that is kept", seed);
    }
}

// Trees that grow for a few levels. Some have a limit of 0.
template <class Real>
void grow_once(Random& random, Scalar type, int64_t vocab, uint64_t seed) {
  const int64_t rows = between(random, 1, 4), keep = between(random, 1, 12), width = between(random, 1, std::min<int64_t>(vocab, 9));
  const int64_t depth = between(random, 1, 4), columns = 1 + depth * keep, cells = rows * columns, reach = std::min(width, keep);
  std::vector<int64_t> tokens(cells, 1);
  std::vector<Real> scores(cells);
  std::vector<int32_t> parents(cells), nodes(cells), limits(rows), offsets(rows + 1);
  for (int64_t b = 0; b < rows; ++b) {
    limits[b] = static_cast<int32_t>(between(random, 0, keep));
    offsets[b + 1] = offsets[b] + (between(random, 0, 4) > 0);
  }
  Growth<Real> growth{tokens.data(), scores.data(), parents.data(), nodes.data(), limits.data(), columns, keep, 0, reach, false};
  tree_begin(growth, rows);
  for (growth.level = 0; growth.level < depth; ++growth.level) {
    growth.last = growth.level + 1 == depth;
    const int64_t count = offsets[rows];
    const SomeDistributions some(random, type, count, vocab);
    std::vector<Real> own, found(count * width);
    for (int64_t b = 0; b < rows; ++b)
      for (int64_t i = 0; i < offsets[b + 1] - offsets[b]; ++i) own.push_back(scores[b * columns + growth.ahead() + i]);
    std::vector<int64_t> kids(count * width);
    std::vector<int32_t> best(rows * keep);
    const Children<Real> children{kids.data(), found.data(), best.data(), width, keep, Real(1)};
    tree_expand<Real>(some.dists, offsets.data(), rows, own.data(), nullptr, nullptr, children);
    const int64_t capacity = rows * (1 + (growth.last ? keep : (growth.level + 1) * reach));
    std::vector<int64_t> packed(capacity);
    std::vector<int32_t> above(capacity), counts(2 * rows);
    expect(tree_enter(growth, children, offsets.data(), rows, {packed.data(), above.data(), counts.data(), capacity}) == -1, "tree_enter", seed);
    int64_t node = 0;
    for (int64_t b = 0; b < rows; ++b) {
      expect(!growth.last || counts[b] <= 1 + limits[b], "the limit of a tree", seed);
      for (int64_t i = 0; i < counts[b]; ++i, ++node) {
        expect(packed[node] >= 0 && packed[node] < std::max<int64_t>(vocab, 2), "a token of a tree", seed);
        expect(i == 0 ? above[node] == -1 : above[node] >= 0 && above[node] < i, "a parent before its child", seed);
      }
      int64_t on = 0;
      for (int64_t c = 0; c < reach; ++c) on += nodes[b * columns + growth.block() + c] >= 0;
      offsets[b + 1] = static_cast<int32_t>(offsets[b] + on);
    }
    expect(node <= capacity, "the capacity of trees", seed);
  }
}

}  // namespace

void expand_case(uint64_t seed) {
  Random random(seed);
  const int64_t vocab = one_of<int64_t>(random, {1, 2, 127, 128, 129, 1025});
  const Trees trees(random, between(random, 1, 4), 6);
  const Scalar type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64});
  const SomeDistributions some(random, type, trees.nodes(), vocab);
  if (some.dists.wide())
    expand_once<double>(random, some.dists, trees, seed);
  else
    expand_once<float>(random, some.dists, trees, seed);
  if (type == Scalar::Float64)
    grow_once<double>(random, type, vocab, seed);
  else
    grow_once<float>(random, type, vocab, seed);
}

}  // namespace specdec::sanitize

#include "verify/expand.h"

#include <algorithm>
#include <limits>

#include "sanitize/some_laws.h"

namespace specdec::sanitize {
namespace {

template <class Real>
void expand_once(Random& random, const Laws& laws, const Trees& trees, uint64_t seed) {
  const int64_t nodes = trees.nodes(), rows = trees.rows(), vocab = laws.logits.columns;
  const int64_t width = between(random, 1, std::min<int64_t>(vocab, 9)), keep = between(random, 1, 12);
  std::vector<Real> parents(nodes), scores(nodes * width);
  std::vector<int64_t> tokens(nodes * width), seeds(nodes, 17);
  std::vector<int32_t> positions(nodes), best(rows * keep);
  for (int64_t i = 0; i < nodes; ++i) {
    parents[i] = between(random, 0, 6) ? -Real(i) / 4 : -std::numeric_limits<Real>::infinity();
    positions[i] = static_cast<int32_t>(between(random, -2, 9));
  }
  const bool noisy = seed % 2;
  tree_expand<Real>(laws, trees.offsets.data(), rows, parents.data(), noisy ? seeds.data() : nullptr,
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

}  // namespace

void expand_case(uint64_t seed) {
  Random random(seed);
  const int64_t vocab = one_of<int64_t>(random, {1, 2, 127, 128, 129, 1025});
  const Trees trees(random, between(random, 1, 4), 6);
  const Scalar type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64});
  const SomeLaws some(random, type, trees.nodes(), vocab);
  if (some.laws.wide())
    expand_once<double>(random, some.laws, trees, seed);
  else
    expand_once<float>(random, some.laws, trees, seed);
}

}  // namespace specdec::sanitize

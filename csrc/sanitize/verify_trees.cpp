// recursive_rejection_verify, traversal_verify and typical_verify, with their thresholds.
#include <algorithm>

#include "sanitize/some_distributions.h"
#include "verify/recursive_rejection.h"
#include "verify/traversal.h"
#include "verify/typical.h"

namespace specdec::sanitize {

void proposals_case(uint64_t seed) {
  Random random(seed);
  const std::vector<Scalar> types{Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64};
  const int64_t vocab = one_of<int64_t>(random, {1, 2, 17, 300, 1024, 1025, 3001});
  const Trees trees(random, between(random, 1, 4), 8);
  const int64_t nodes = trees.nodes(), rows = trees.rows();
  const SomeDistributions target(random, one_of(random, types), nodes, vocab);

  // The draft's vocabulary may be a permuted part of the target's.
  const int64_t draft_vocab = between(random, 1, vocab), dist_rows = between(random, 1, 3);
  std::vector<int64_t> ids;
  for (int64_t v = 0; v < vocab; ++v) ids.push_back(v);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<size_t>(draft_vocab));
  ids.shrink_to_fit();
  const SomeDistributions drafts(random, one_of(random, types), dist_rows, draft_vocab);
  std::vector<int64_t> tokens(nodes);
  std::vector<int8_t> proposal_kinds(nodes, kDeterministic);
  std::vector<int32_t> dist_index(nodes, -1), depth(nodes), row_of(nodes), child(nodes), sibling(nodes);
  std::unique_ptr<bool[]> score_only(new bool[nodes]());
  for (int64_t i = 0; i < nodes; ++i) {
    tokens[i] = one_of(random, ids);
    score_only[i] = trees.parents[i] >= 0 && between(random, 0, 9) == 0;
    if (seed % 3 == 0) continue;
    proposal_kinds[i] = static_cast<int8_t>(between(random, kDeterministic, kSampledWithoutDeterministic));
    if (proposal_kinds[i] != kDeterministic) dist_index[i] = static_cast<int32_t>(between(random, 0, dist_rows - 1));
  }
  std::vector<int32_t> ancestors(nodes);
  expect(tree_plan(trees.parents.data(), nodes, trees.offsets.data(), rows, {depth.data(), row_of.data(), ancestors.data(), child.data(), sibling.data(), 1}) == -1,
         "tree_plan", seed);
  const TreeDraft draft{tokens.data(), trees.offsets.data(), child.data(), sibling.data(), proposal_kinds.data(), dist_index.data(),
                        seed % 2 ? score_only.get() : nullptr, nodes, rows, seed % 3 ? &drafts.dists : nullptr,
                        draft_vocab == vocab && seed % 2 ? nullptr : ids.data()};
  int64_t at = 0;
  expect(invalid_tree(draft, target.dists, &at) == nullptr, "a valid tree", seed);
  const int64_t most = deepest(draft);
  expect(most == (nodes ? *std::max_element(depth.begin(), depth.end()) : 0), "the deepest node", seed);

  std::vector<int32_t> path(rows * (most + 1)), accepted(rows), roots(rows, 7);
  std::vector<int64_t> next(rows), row_seeds(rows, static_cast<int64_t>(seed));
  const Block uniforms(Scalar::Float32, nodes, random), block_noise(Scalar::Float32, rows * block_count(vocab), random), token_noise(Scalar::Float32, rows * vocab, random);
  const StepNoise keyed{row_seeds.data(), roots.data(), nullptr, nullptr, nullptr};
  const StepNoise given{row_seeds.data(), roots.data(), static_cast<const float*>(uniforms.data()), static_cast<const float*>(block_noise.data()), static_cast<const float*>(token_noise.data())};
  const Path out{path.data(), accepted.data(), next.data(), most};
  const bool wide = target.dists.wide() || (draft.dists != nullptr && drafts.dists.wide());
  const Block accept(wide ? Scalar::Float64 : Scalar::Float32, nodes), residual(wide ? Scalar::Float64 : Scalar::Float32, nodes * vocab);
  const auto check = [&](const char* what) {
    for (int64_t b = 0; b < rows; ++b) {
      const bool empty = trees.offsets[b] == trees.offsets[b + 1];
      expect(empty ? next[b] == -1 && accepted[b] == 0 : accepted[b] >= 0 && accepted[b] <= most && next[b] >= 0 && next[b] < vocab, what, seed);
      for (int32_t step = 0; step <= most; ++step) {
        const int32_t node = path[b * (most + 1) + step];
        expect(empty || step > accepted[b] ? node == -1 : depth[node] == step && row_of[node] == b, what, seed);
      }
    }
  };
  const auto check_thresholds = [&](const char* what) {
    for (int64_t i = 0; i < nodes; ++i) expect(accept.get(i) >= 0 && accept.get(i) <= 1, what, seed);
  };
  for (const StepNoise& noise : {keyed, given}) {
    recursive_rejection_verify(draft, target.dists, noise, out);
    check("recursive_rejection_verify");
    traversal_verify(draft, target.dists, noise, out);
    check("traversal_verify");
    typical_verify(draft, target.dists, {0.3, 0.7}, noise, out);
    check("typical_verify");
  }
  recursive_rejection_thresholds(draft, target.dists, accept.data(), residual.data());
  check_thresholds("recursive_rejection_thresholds");
  traversal_thresholds(draft, target.dists, accept.data(), residual.data());
  check_thresholds("traversal_thresholds");
}

}  // namespace specdec::sanitize

// replay_sample, draft_sample, rejection_verify, tree_plan, exact_match_verify and replay_verify.
#include <algorithm>
#include <cmath>
#include <limits>

#include "sanitize/some_distributions.h"
#include "verify/rejection.h"
#include "distribution/distribution_stats.h"
#include "sampling/sample.h"

namespace specdec::sanitize {
namespace {

void check_tokens(const std::vector<int64_t>& tokens, int64_t vocab, const char* what, uint64_t seed) {
  for (int64_t token : tokens) expect(token >= 0 && token < vocab, what, seed);
}

}  // namespace

void verify_case(uint64_t seed) {
  Random random(seed);
  const std::vector<Scalar> types{Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64};
  const int64_t vocab = one_of<int64_t>(random, {1, 2, 17, 300, 1024, 1025, 3001});
  const Trees trees(random, between(random, 1, 4), 6);
  const int64_t nodes = trees.nodes(), rows = trees.rows();
  const SomeDistributions target(random, one_of(random, types), nodes, vocab);

  std::vector<int64_t> seeds(nodes), tokens(nodes);
  std::vector<int32_t> positions(nodes);
  for (int64_t i = 0; i < nodes; ++i) {
    seeds[i] = between(random, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
    positions[i] = static_cast<int32_t>(between(random, 0, 5000));
  }
  replay_sample(target.dists, seeds.data(), positions.data(), nullptr, tokens.data());
  check_tokens(tokens, vocab, "a replayed token", seed);
  const Block noise(Scalar::Float32, nodes * vocab, random);
  replay_sample(target.dists, seeds.data(), positions.data(), static_cast<const float*>(noise.data()), tokens.data());
  check_tokens(tokens, vocab, "a token replayed from given noise", seed);
  draft_sample(target.dists, seeds.data(), positions.data(), positions.data(), tokens.data());
  check_tokens(tokens, vocab, "a sampled token", seed);

  // Chains: the draft's vocabulary may be a permuted part of the target's.
  const int64_t draft_vocab = between(random, 1, vocab), dist_rows = between(random, 1, 5);
  std::vector<int64_t> ids;
  for (int64_t v = 0; v < vocab; ++v) ids.push_back(v);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<size_t>(draft_vocab));
  ids.shrink_to_fit();
  const SomeDistributions draft(random, one_of(random, types), dist_rows, draft_vocab);
  std::vector<int8_t> proposal_kinds(nodes, 0);
  std::vector<int32_t> dist_index(nodes, -1);
  for (int64_t i = 0; i < nodes; ++i) {
    tokens[i] = one_of(random, ids);
    const int32_t row = static_cast<int32_t>(between(random, 0, dist_rows - 1));
    if (trees.parents[i] >= 0 && seed % 3 != 0 && !draft.dists.broken(row)) proposal_kinds[i] = 1, dist_index[i] = row;
  }
  const bool same_vocabulary = draft_vocab == vocab && seed % 2;
  const ChainDraft chain{tokens.data(), trees.offsets.data(), proposal_kinds.data(), dist_index.data(), nodes, rows,
                         seed % 3 != 0 ? &draft.dists : nullptr, same_vocabulary ? nullptr : ids.data()};
  int64_t at = 0;
  expect(invalid_chain(chain, target.dists, &at) == nullptr, "a valid chain", seed);
  const int64_t depth = 6;
  std::vector<int32_t> path(rows * (depth + 1)), accepted(rows), roots(rows, 7);
  std::vector<int64_t> next(rows), row_seeds(rows, static_cast<int64_t>(seed));
  const ChainRule rule = seed % 5 < 2 ? ChainRule::kBlock : ChainRule::kRejection;
  rejection_verify(chain, target.dists, rule, {row_seeds.data(), roots.data(), nullptr, nullptr, nullptr}, {path.data(), accepted.data(), next.data(), depth});
  const auto check_path = [&](const char* what) {
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t count = trees.offsets[b + 1] - trees.offsets[b];
      expect(count == 0 ? next[b] == -1 && accepted[b] == 0 : accepted[b] >= 0 && accepted[b] < count && next[b] >= 0 && next[b] < vocab, what, seed);
    }
  };
  check_path("rejection_verify");

  // The same with statistics that are computed on first use.
  const Scalar real = target.dists.wide() ? Scalar::Float64 : Scalar::Float32;
  const Block inv_t(real, nodes), lse(real, nodes), cut(real, nodes), mass(real, nodes * block_count(vocab));
  std::vector<int32_t> tie_id(nodes), top_k(nodes, seed % 2 ? 0 : 3);
  std::vector<float> temperature(nodes, seed % 7 ? 1.0f : 0.0f), top_p(nodes, seed % 4 ? 1.0f : 0.9f), min_p(nodes, 0.0f);
  const LazyStats lazy{target.dists.logits, {temperature.data(), top_k.data(), top_p.data(), min_p.data()}, inv_t.data(), lse.data(), cut.data(), tie_id.data(), mass.data()};
  mark_uncomputed(lazy, 0, lazy.logits.rows);
  TokenDistributions pending{target.dists.logits, inv_t.data(), lse.data(), cut.data(), tie_id.data(), mass.data(), &lazy};
  rejection_verify(chain, pending, rule, {row_seeds.data(), roots.data(), nullptr, nullptr, nullptr}, {path.data(), accepted.data(), next.data(), depth});
  check_path("rejection_verify on logits");
  const Block uniforms(Scalar::Float32, nodes, random), block_noise(Scalar::Float32, rows * block_count(vocab), random), token_noise(Scalar::Float32, rows * vocab, random);
  rejection_verify(chain, target.dists, rule,
               {row_seeds.data(), roots.data(), static_cast<const float*>(uniforms.data()), static_cast<const float*>(block_noise.data()), static_cast<const float*>(token_noise.data())},
               {path.data(), accepted.data(), next.data(), depth});
  check_path("rejection_verify with given noise");
  const bool wide = target.dists.wide() || (chain.dists != nullptr && draft.dists.wide());
  const Block accept(wide ? Scalar::Float64 : Scalar::Float32, nodes), residual(wide ? Scalar::Float64 : Scalar::Float32, nodes * vocab);
  rejection_thresholds(chain, target.dists, rule, accept.data(), residual.data());
  for (int64_t i = 0; i < nodes; ++i) expect(!(accept.get(i) < 0), "an accept threshold", seed);

  // Trees.
  int32_t words = (widest_row(trees.offsets.data(), rows) + 31) / 32;
  words = words > 0 ? words : 1;
  std::vector<int32_t> depths(nodes), row_of(nodes), ancestors(nodes * words), child(nodes), sibling(nodes);
  expect(tree_plan(trees.parents.data(), nodes, trees.offsets.data(), rows, {depths.data(), row_of.data(), ancestors.data(), child.data(), sibling.data(), words}) == -1,
         "tree_plan", seed);
  std::vector<int64_t> choice(nodes);
  for (int64_t i = 0; i < nodes; ++i) choice[i] = nodes ? tokens[between(random, 0, nodes - 1)] : 0;
  std::unique_ptr<bool[]> score_only(new bool[nodes]());
  if (nodes > 1) score_only[nodes - 1] = trees.parents[nodes - 1] >= 0;
  int64_t row = 0;
  const WalkedTree walked{tokens.data(), nodes, trees.offsets.data(), child.data(), sibling.data(), seed % 2 ? score_only.get() : nullptr};
  const Path walked_path{path.data(), accepted.data(), next.data(), depth};
  expect(exact_match_verify(walked, rows, choice.data(), walked_path, &row) == Walk::kFine, "exact_match_verify", seed);
  check_path("exact_match_verify");
  mark_uncomputed(lazy, 0, lazy.logits.rows);
  expect(replay_verify(walked, rows, pending, row_seeds.data(), roots.data(), walked_path, &row) == Walk::kFine, "replay_verify", seed);
  check_path("replay_verify");
}

}  // namespace specdec::sanitize

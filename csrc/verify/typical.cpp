#include "verify/typical.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace specdec {
namespace {

// Entropy of one distribution, in nats.
template <class Real>
double entropy(const TokenDistributions& dists, int64_t row) {
  if (dists.greedy(row)) return 0;
  const DistributionRow<Real> dist = dists.row<Real>(row);
  alignas(64) Real weights[kVocabBlock], scaled[kVocabBlock];
  double sum = 0;
  for (int64_t block = 0; block < block_count(dists.logits.columns); ++block) {
    const int64_t first = block * kVocabBlock;
    const int count = block_size(dists.logits.columns, block);
    dists.weights(row, first, count, weights);
    rows::scaled_logits(dists.logits.type, dists.logits.at(row, first), count, dist.inv_t, nullptr, scaled);
    for (int i = 0; i < count; ++i) sum += weights[i] > 0 ? static_cast<double>(weights[i] * (dist.lse - scaled[i])) : 0.0;
  }
  return sum;
}

template <class Real>
void verify(const TreeDraft& draft, const TokenDistributions& target, const TypicalLimit& limit, const StepNoise& noise, const Path& out) {
  const DraftDistributions none(nullptr, nullptr);
  const int64_t vocab = target.logits.columns;
  parallel_for(0, draft.rows, std::max<int64_t>(1, row_grain(vocab) / 8), [&](int64_t begin, int64_t end) {
    CachedRows<Real> rows(target, none);
    NodeResidual<Real> residual(draft, rows, false);
    std::vector<int64_t> next;
    std::vector<int32_t> length;
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.start(b);
      const int64_t root = draft.offsets[b], stop = draft.offsets[b + 1];
      if (root == stop) continue;
      next.assign(stop - root, -1);
      length.assign(stop - root, 0);  // of the longest accepted path below a node
      for (int64_t node = stop - 1; node >= root; --node) {  // children come after their parents
        double threshold = -1;
        for (int64_t child = draft.first_child[node]; child >= 0; child = draft.next_sibling[child]) {
          if (draft.is_score_only(child)) continue;
          if (threshold < 0) threshold = std::min(limit.epsilon, limit.delta * std::exp(-entropy<Real>(target, node)));
          const bool typical = std::exp(target.log_weight(node, draft.tokens[child])) > threshold;
          if (typical && length[child - root] + 1 > length[node - root]) {
            length[node - root] = length[child - root] + 1;
            next[node - root] = child;
          }
        }
      }
      int64_t last = root;
      for (int32_t step = 0; last >= 0; ++step) {
        path[step] = static_cast<int32_t>(last);
        if (next[last - root] < 0) break;
        last = next[last - root];
      }
      out.num_accepted[b] = length[0];
      residual.start(last);
      out.next_token[b] = residual.sample(noise.recover_noise(b, length[0], vocab));
    }
  });
}

}  // namespace

void typical_verify(const TreeDraft& draft, const TokenDistributions& target, const TypicalLimit& limit, const StepNoise& noise, const Path& out) {
  target.wide() ? verify<double>(draft, target, limit, noise, out) : verify<float>(draft, target, limit, noise, out);
}

}  // namespace specdec

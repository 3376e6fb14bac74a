#include "verify/recursive_rejection.h"

#include <algorithm>

#include "parallel.h"

namespace specdec {
namespace {

template <class Real>
void verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns;
  parallel_for(0, draft.rows, std::max<int64_t>(1, row_grain(vocab) / 8), [&](int64_t begin, int64_t end) {
    CachedRows<Real> rows(target, dists);
    NodeResidual<Real> residual(draft, rows, false);
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.start(b);
      const int64_t root = draft.offsets[b];
      if (root == draft.offsets[b + 1]) continue;
      int32_t accepted = 0;
      for (int64_t node = root, next = root; next >= 0; node = next) {
        path[accepted] = static_cast<int32_t>(node);
        residual.start(node);
        next = -1;
        for (int index = 0; index < residual.size() && next < 0; ++index) {
          const double proposal_prob = residual.proposal_prob(index);
          if (!(proposal_prob > 0)) continue;
          const Real threshold = static_cast<Real>(std::min(1.0, residual.ratio(index, proposal_prob)));
          if (noise.accept_uniform(b, root, residual.child(index)) < threshold)
            next = residual.child(index);
          else
            residual.reject(index, 1);
        }
        if (next >= 0) ++accepted;
      }
      out.num_accepted[b] = accepted;
      out.next_token[b] = residual.sample(noise.recover_noise(b, accepted, vocab));
    }
  });
}

template <class Real>
void thresholds(const TreeDraft& draft, const TokenDistributions& target, Real* accept, Real* out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns, tail = draft.offsets[draft.rows];
  CachedRows<Real> rows(target, dists);
  NodeResidual<Real> residual(draft, rows, true);
  std::fill_n(accept, draft.nodes, Real{0});
  std::fill(out + tail * vocab, out + draft.nodes * vocab, Real{0});
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      if (node == draft.offsets[b]) accept[node] = 1;
      residual.start(node);
      for (int index = 0; index < residual.size(); ++index) {
        const double proposal_prob = residual.proposal_prob(index);
        if (!(proposal_prob > 0)) continue;
        accept[residual.child(index)] = static_cast<Real>(std::min(1.0, residual.ratio(index, proposal_prob)));
        residual.reject(index, 1);
      }
      residual.write(out + node * vocab);
    }
}

}  // namespace

void recursive_rejection_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  with_accumulator(target, draft.dists, [&](auto real) { verify<decltype(real)>(draft, target, noise, out); });
}

void recursive_rejection_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual) {
  with_accumulator(target, draft.dists, [&](auto real) {
    using Real = decltype(real);
    thresholds(draft, target, static_cast<Real*>(accept), static_cast<Real*>(residual));
  });
}

}  // namespace specdec

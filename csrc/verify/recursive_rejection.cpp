#include "verify/recursive_rejection.h"

#include <algorithm>

#include "parallel.h"

namespace specdec {
namespace {

template <class Real>
void verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns, width = out.max_depth + 1;
  parallel_for(0, draft.rows, std::max<int64_t>(1, row_grain(vocab) / 8), [&](int64_t begin, int64_t end) {
    KeptRows<Real> kept(target, dists);
    Rest<Real> rest(draft, kept, false);
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.path + b * width;
      std::fill_n(path, width, -1);
      out.num_accepted[b] = 0;
      out.next_token[b] = -1;
      const int64_t root = draft.offsets[b];
      if (root == draft.offsets[b + 1]) continue;
      int32_t accepted = 0;
      for (int64_t node = root, next = root; next >= 0; node = next) {
        path[accepted] = static_cast<int32_t>(node);
        rest.start(node);
        next = -1;
        for (int place = 0; place < rest.size() && next < 0; ++place) {
          const double offered = rest.offered(place);
          if (!(offered > 0)) continue;
          const Real threshold = static_cast<Real>(std::min(1.0, rest.ratio(place, offered)));
          if (noise.coin(b, root, rest.child(place)) < threshold)
            next = rest.child(place);
          else
            rest.refuse(place, 1);
        }
        if (next >= 0) ++accepted;
      }
      out.num_accepted[b] = accepted;
      out.next_token[b] = rest.draw(noise.race(b, accepted, vocab));
    }
  });
}

template <class Real>
void thresholds(const TreeDraft& draft, const TokenDistributions& target, Real* accept, Real* residual) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns, tail = draft.offsets[draft.rows];
  KeptRows<Real> kept(target, dists);
  Rest<Real> rest(draft, kept, true);
  std::fill_n(accept, draft.nodes, Real{0});
  std::fill(residual + tail * vocab, residual + draft.nodes * vocab, Real{0});
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      if (node == draft.offsets[b]) accept[node] = 1;
      rest.start(node);
      for (int place = 0; place < rest.size(); ++place) {
        const double offered = rest.offered(place);
        if (!(offered > 0)) continue;
        accept[rest.child(place)] = static_cast<Real>(std::min(1.0, rest.ratio(place, offered)));
        rest.refuse(place, 1);
      }
      rest.write(residual + node * vocab);
    }
}

}  // namespace

void recursive_rejection_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  target.wide() || (draft.dists != nullptr && draft.dists->wide()) ? verify<double>(draft, target, noise, out)
                                                                 : verify<float>(draft, target, noise, out);
}

void recursive_rejection_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual) {
  if (target.wide() || (draft.dists != nullptr && draft.dists->wide()))
    thresholds(draft, target, static_cast<double*>(accept), static_cast<double*>(residual));
  else
    thresholds(draft, target, static_cast<float*>(accept), static_cast<float*>(residual));
}

}  // namespace specdec

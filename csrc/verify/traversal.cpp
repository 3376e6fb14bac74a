#include "verify/traversal.h"

#include <algorithm>
#include <deque>

#include "parallel.h"

namespace specdec {
namespace {

// Walks one tree in post-order and rejects a proposal only when its whole subtree was rejected.
template <class Real>
class Traversal {
 public:
  Traversal(const TreeDraft& draft, const TokenDistributions& target, const DraftDistributions& dists, const StepNoise& noise)
      : draft_(draft), rows_(target, dists), noise_(noise) {}

  void row(int64_t b, int32_t* path, int32_t* accepted, int64_t* next_token) {
    const int64_t root = draft_.offsets[b];
    int32_t depth = 0;
    enter(depth, root, 1.0, path);
    while (true) {
      Level& at = levels_[depth];
      if (const double child_reach = next_reach(at); child_reach > 0) {
        enter(++depth, at.residual.child(at.index), child_reach, path);
        continue;
      }
      const int64_t node = path[depth];
      if (node == root || noise_.accept_uniform(b, root, node) < static_cast<Real>(at.reach)) break;
      path[depth] = -1;
      reject(levels_[--depth]);  // the whole subtree was rejected
    }
    *accepted = depth;
    *next_token = levels_[depth].residual.sample(noise_.recover_noise(b, depth, rows_.target.logits.columns));
  }

 private:
  // A node on the path from the root: its reach so far, and the index of the current child.
  struct Level {
    NodeResidual<Real> residual;
    double reach = 0;
    int index = 0;
  };

  void enter(int32_t depth, int64_t node, double reach, int32_t* path) {
    if (static_cast<size_t>(depth) == levels_.size()) levels_.push_back({NodeResidual<Real>(draft_, rows_, false)});
    levels_[depth].residual.start(node);
    levels_[depth].reach = reach;
    levels_[depth].index = 0;
    path[depth] = static_cast<int32_t>(node);
  }

  // Reach of the next child that can be accepted; 0 if none is left.
  double next_reach(Level& at) {
    for (; at.index < at.residual.size() && at.reach > 0; ++at.index) {
      const double proposal_prob = at.residual.proposal_prob(at.index);
      if (!(proposal_prob > 0)) continue;
      const double child_reach = std::min(1.0, at.reach * at.residual.ratio(at.index, proposal_prob));
      if (child_reach > 0) return child_reach;
      at.reach = at.residual.reject(at.index, at.reach);
    }
    return 0;
  }

  void reject(Level& at) {
    at.reach = at.residual.reject(at.index, at.reach);
    ++at.index;
  }

  const TreeDraft& draft_;
  CachedRows<Real> rows_;
  const StepNoise& noise_;
  std::deque<Level> levels_;  // one per depth; a deque keeps references valid
};

template <class Real>
void verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t grain = std::max<int64_t>(1, row_grain(target.logits.columns) / 8);
  parallel_for(0, draft.rows, grain, [&](int64_t begin, int64_t end) {
    Traversal<Real> walk(draft, target, dists, noise);
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.start(b);
      if (draft.offsets[b] < draft.offsets[b + 1]) walk.row(b, path, out.num_accepted + b, out.next_token + b);
    }
  });
}

template <class Real>
void thresholds(const TreeDraft& draft, const TokenDistributions& target, Real* accept, Real* out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns, tail = draft.offsets[draft.rows];
  CachedRows<Real> rows(target, dists);
  NodeResidual<Real> residual(draft, rows, true);
  std::vector<double> reach(draft.nodes, 0.0);
  std::fill_n(accept, draft.nodes, Real{0});
  std::fill(out + tail * vocab, out + draft.nodes * vocab, Real{0});
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      double own = node == draft.offsets[b] ? 1.0 : reach[node];
      residual.start(node);
      for (int index = 0; index < residual.size(); ++index) {
        const double proposal_prob = residual.proposal_prob(index);
        if (!(proposal_prob > 0)) continue;
        reach[residual.child(index)] = std::min(1.0, own * residual.ratio(index, proposal_prob));
        own = residual.reject(index, own);
      }
      accept[node] = static_cast<Real>(own);
      residual.write(out + node * vocab);
    }
}

}  // namespace

void traversal_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  with_accumulator(target, draft.dists, [&](auto real) { verify<decltype(real)>(draft, target, noise, out); });
}

void traversal_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual) {
  with_accumulator(target, draft.dists, [&](auto real) {
    using Real = decltype(real);
    thresholds(draft, target, static_cast<Real*>(accept), static_cast<Real*>(residual));
  });
}

}  // namespace specdec

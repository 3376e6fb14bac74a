#include "verify/traversal.h"

#include <algorithm>
#include <deque>

#include "parallel.h"

namespace specdec {
namespace {

// The walk over one row, in post-order, weighing a node's proposals only when their subtrees have failed.
template <class Real>
class Traversal {
 public:
  Traversal(const TreeDraft& draft, const TokenDistributions& target, const DraftDistributions& dists, const StepNoise& noise)
      : draft_(draft), kept_(target, dists), noise_(noise) {}

  void row(int64_t b, int32_t* path, int32_t* accepted, int64_t* next_token) {
    const int64_t root = draft_.offsets[b];
    int32_t depth = 0;
    enter(depth, root, 1.0, path);
    while (true) {
      Level& at = levels_[depth];
      if (const double below = next_reach(at); below > 0) {
        enter(++depth, at.rest.child(at.place), below, path);
        continue;
      }
      const int64_t node = path[depth];
      if (node == root || noise_.coin(b, root, node) < static_cast<Real>(at.reach)) break;
      path[depth] = -1;
      refuse(levels_[--depth]);  // the whole subtree has failed
    }
    *accepted = depth;
    *next_token = levels_[depth].rest.draw(noise_.race(b, depth, kept_.target.logits.columns));
  }

 private:
  // A node on the way from the root: its reach so far, and the child that is looked at.
  struct Level {
    Rest<Real> rest;
    double reach = 0;
    int place = 0;
  };

  void enter(int32_t depth, int64_t node, double reach, int32_t* path) {
    if (static_cast<size_t>(depth) == levels_.size()) levels_.push_back({Rest<Real>(draft_, kept_, false)});
    levels_[depth].rest.start(node);
    levels_[depth].reach = reach;
    levels_[depth].place = 0;
    path[depth] = static_cast<int32_t>(node);
  }

  // Reach of the next child that can be accepted; 0 if there is none left.
  double next_reach(Level& at) {
    for (; at.place < at.rest.size() && at.reach > 0; ++at.place) {
      const double offered = at.rest.offered(at.place);
      if (!(offered > 0)) continue;
      const double below = std::min(1.0, at.reach * at.rest.ratio(at.place, offered));
      if (below > 0) return below;
      at.reach = at.rest.refuse(at.place, at.reach);
    }
    return 0;
  }

  void refuse(Level& at) {
    at.reach = at.rest.refuse(at.place, at.reach);
    ++at.place;
  }

  const TreeDraft& draft_;
  KeptRows<Real> kept_;
  const StepNoise& noise_;
  std::deque<Level> levels_;  // one per depth; references stay valid
};

template <class Real>
void verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t width = out.max_depth + 1;
  const int64_t grain = std::max<int64_t>(1, row_grain(target.logits.columns) / 8);
  parallel_for(0, draft.rows, grain, [&](int64_t begin, int64_t end) {
    Traversal<Real> walk(draft, target, dists, noise);
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.path + b * width;
      std::fill_n(path, width, -1);
      out.num_accepted[b] = 0;
      out.next_token[b] = -1;
      if (draft.offsets[b] < draft.offsets[b + 1]) walk.row(b, path, out.num_accepted + b, out.next_token + b);
    }
  });
}

template <class Real>
void thresholds(const TreeDraft& draft, const TokenDistributions& target, Real* accept, Real* residual) {
  const DraftDistributions dists(draft.dists, draft.token_ids);
  const int64_t vocab = target.logits.columns, tail = draft.offsets[draft.rows];
  KeptRows<Real> kept(target, dists);
  Rest<Real> rest(draft, kept, true);
  std::vector<double> reach(draft.nodes, 0.0);
  std::fill_n(accept, draft.nodes, Real{0});
  std::fill(residual + tail * vocab, residual + draft.nodes * vocab, Real{0});
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      double own = node == draft.offsets[b] ? 1.0 : reach[node];
      rest.start(node);
      for (int place = 0; place < rest.size(); ++place) {
        const double offered = rest.offered(place);
        if (!(offered > 0)) continue;
        reach[rest.child(place)] = std::min(1.0, own * rest.ratio(place, offered));
        own = rest.refuse(place, own);
      }
      accept[node] = static_cast<Real>(own);
      rest.write(residual + node * vocab);
    }
}

}  // namespace

void traversal_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out) {
  target.wide() || (draft.dists != nullptr && draft.dists->wide()) ? verify<double>(draft, target, noise, out)
                                                                 : verify<float>(draft, target, noise, out);
}

void traversal_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual) {
  if (target.wide() || (draft.dists != nullptr && draft.dists->wide()))
    thresholds(draft, target, static_cast<double*>(accept), static_cast<double*>(residual));
  else
    thresholds(draft, target, static_cast<float*>(accept), static_cast<float*>(residual));
}

}  // namespace specdec

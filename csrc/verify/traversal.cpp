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
  Traversal(const TreeDraft& draft, const Laws& target, const DraftLaws& laws, const StepNoise& noise)
      : draft_(draft), kept_(target, laws), noise_(noise) {}

  void row(int64_t b, int32_t* path, int32_t* accepted, int64_t* next_token) {
    row_ = b;
    root_ = draft_.offsets[b];
    path_ = path;
    visit(root_, 0, 1.0);
    *accepted = accepted_;
    *next_token = token_;
  }

 private:
  // Whether a node of this subtree is accepted; if so the path, its length and the next token are known.
  bool visit(int64_t node, int32_t depth, double reach) {
    if (static_cast<size_t>(depth) == rests_.size()) rests_.emplace_back(draft_, kept_, false);
    Rest<Real>& rest = rests_[depth];
    rest.start(node);
    path_[depth] = static_cast<int32_t>(node);
    for (int place = 0; place < rest.size() && reach > 0; ++place) {
      const double offered = rest.offered(place);
      if (!(offered > 0)) continue;
      const double below = std::min(1.0, reach * rest.ratio(place, offered));
      if (below > 0 && visit(rest.child(place), depth + 1, below)) return true;
      path_[depth + 1] = -1;
      reach = rest.refuse(place, reach);
    }
    if (node != root_ && !(noise_.coin(row_, root_, node) < static_cast<Real>(reach))) return false;
    accepted_ = depth;
    token_ = rest.draw(noise_.race(row_, depth, kept_.target.logits.columns));
    return true;
  }

  const TreeDraft& draft_;
  KeptRows<Real> kept_;
  const StepNoise& noise_;
  std::deque<Rest<Real>> rests_;  // one per depth; references stay valid
  int64_t row_ = 0, root_ = 0, token_ = -1;
  int32_t accepted_ = 0;
  int32_t* path_ = nullptr;
};

template <class Real>
void verify(const TreeDraft& draft, const Laws& target, const StepNoise& noise, const Path& out) {
  const DraftLaws laws(draft.laws, draft.token_ids);
  const int64_t width = out.max_depth + 1;
  const int64_t grain = std::max<int64_t>(1, row_grain(target.logits.columns) / 8);
  parallel_for(0, draft.rows, grain, [&](int64_t begin, int64_t end) {
    Traversal<Real> walk(draft, target, laws, noise);
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
void thresholds(const TreeDraft& draft, const Laws& target, Real* accept, Real* residual) {
  const DraftLaws laws(draft.laws, draft.token_ids);
  const int64_t vocab = target.logits.columns, tail = draft.offsets[draft.rows];
  KeptRows<Real> kept(target, laws);
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

void traversal_verify(const TreeDraft& draft, const Laws& target, const StepNoise& noise, const Path& out) {
  target.wide() || (draft.laws != nullptr && draft.laws->wide()) ? verify<double>(draft, target, noise, out)
                                                                 : verify<float>(draft, target, noise, out);
}

void traversal_thresholds(const TreeDraft& draft, const Laws& target, void* accept, void* residual) {
  if (target.wide() || (draft.laws != nullptr && draft.laws->wide()))
    thresholds(draft, target, static_cast<double*>(accept), static_cast<double*>(residual));
  else
    thresholds(draft, target, static_cast<float*>(accept), static_cast<float*>(residual));
}

}  // namespace specdec

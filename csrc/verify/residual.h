// Drafts as packed trees of B requests with M nodes, and the residual distribution of a node while its proposals are
// rejected one after another. Shared by recursive_rejection_verify, traversal_verify and typical_verify.
//
// The arithmetic is that of kernels/specdec_kernels/ops/_proposals/reference.py. While only deterministic proposals are
// rejected, the residual keeps the target's row in place: tokens are removed and one pass sums the remaining mass. The
// first rejected sampled proposal makes a dense copy [V]; each further one costs one pass.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "distribution/cached_row.h"
#include "trees/tree.h"
#include "verify/step_noise.h"

namespace specdec {

// How a token was proposed. The values are those of the ProposalKind enum in Python.
enum ProposalKind : int8_t {
  kDeterministic = 0,
  kSampled = 1,                     // from its draft distribution
  kSampledWithoutEarlier = 2,       // from it without the tokens that earlier siblings sampled from it
  kSampledWithoutDeterministic = 3  // from it without the tokens of deterministic siblings
};

struct TreeDraft {
  const int64_t* tokens;   // [M], target ids
  const int32_t* offsets;  // [B + 1]
  const int32_t *first_child, *next_sibling;  // [M], packed indices, -1: none
  const int8_t* proposal_kinds;               // [M], ProposalKind
  const int32_t* dist_index;                  // [M], row of `dists` for sampled nodes
  const bool* score_only;                     // [M], or nullptr: no node is
  int64_t nodes, rows;                        // M, B
  const TokenDistributions* dists;            // nullptr if every node is deterministic
  const int64_t* token_ids;                   // target id of each draft column, distinct; nullptr: the same ids

  bool is_score_only(int64_t node) const { return score_only != nullptr && score_only[node]; }
};

// The name of the first invalid argument, or nullptr; *at is the node (or the column of token_ids).
const char* invalid_tree(const TreeDraft& draft, const TokenDistributions& target, int64_t* at);

// Depth of the deepest node of a valid draft.
int32_t deepest(const TreeDraft& draft);

template <class Real>
class NodeResidual {
 public:
  // exact: take no shortcut that changes the scale of the weights.
  NodeResidual(const TreeDraft& draft, CachedRows<Real>& rows, bool exact)
      : draft_(draft),
        target_(rows.target),
        dists_(rows.draft),
        rows_(rows),
        vocab_(target_.logits.columns),
        blocks_(block_count(vocab_)),
        epsilon_(target_.wide() && (draft.dists == nullptr || draft.dists->wide()) ? 0x1p-44 : 0x1p-20),
        exact_(exact) {}

  // Resets to the target's distribution after `node`, with all of the node's proposals untested.
  void start(int64_t node);

  int size() const { return static_cast<int>(children_.size()); }
  int64_t child(int index) const { return children_[index]; }

  // Q(x) of a proposal. 0 if its token cannot be sampled from its distribution, so it is no proposal.
  double proposal_prob(int index);
  // r(x) / Q(x), where r is the normalised residual and proposal_prob = Q(x).
  double ratio(int index, double proposal_prob) const {
    return weight(draft_.tokens[children_[index]]) / total_ / proposal_prob;
  }
  // Replaces the residual by the positive part of reach * r - Q and returns S / (S + 1 - reach) for its total S. An
  // empty result leaves the residual unchanged and returns 0, or 1 for reach 1. A broken distribution returns `reach`.
  double reject(int index, double reach);

  // Samples one token of the residual by Gumbel-max; 0 if the residual is empty.
  int64_t sample(const GumbelNoise& noise) const;
  // Writes the unnormalised residual to out [V].
  void write(Real* out) const;

 private:
  // Mass of a draft distribution outside `tokens`: those sampled from it, or those of deterministic children.
  struct Masked {
    int64_t row;
    bool deterministic;
    double base;
    std::vector<int64_t> tokens;
  };

  double weight(int64_t token) const;
  double q_weight(int64_t row, int64_t token) const { return std::exp(dists_.log_weight(row, token)); }
  void block(int64_t b, Real* out) const;
  void find_excluded(int index);
  const Masked& masked(int64_t row, bool deterministic);
  double mass_outside();
  double remaining();
  double remove_token(int64_t token, double reach);
  double subtract(int index, double reach);
  static double reach_after(double share, double reach) { return share / (share + (1.0 - reach)); }
  static double reach_if_empty(double reach) { return reach < 1 ? 0.0 : 1.0; }
  // Total of a block's weights without some tokens (ascending).
  static double total_without(Real* weights, int count, int64_t first, const std::vector<int64_t>& tokens);

  const TreeDraft& draft_;
  const TokenDistributions& target_;
  const DraftDistributions& dists_;
  CachedRows<Real>& rows_;
  int64_t vocab_, blocks_;
  double epsilon_;  // a smaller total is rounding error: the residual is empty
  bool exact_;

  int64_t node_ = -1;
  std::vector<int64_t> children_;
  std::vector<int64_t> deterministic_;  // distinct tokens of deterministic children, ascending
  std::vector<int64_t> removed_;        // tokens removed from the target's row in place
  std::vector<int64_t> excluded_;       // tokens that the current proposal cannot be
  std::vector<Masked> masked_;
  double scale_ = 1;     // of the proposal's distribution, to make up for excluded_
  double total_ = 1;     // of the residual
  double outside_ = -1;  // of the residual outside deterministic_; negative: not summed yet
  bool dense_ = false;
  std::vector<Real> dense_weights_, spare_;
  std::vector<double> block_totals_, spare_totals_;
};

extern template class NodeResidual<float>;
extern template class NodeResidual<double>;

}  // namespace specdec

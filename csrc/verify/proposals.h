// Proposals on packed trees, and what is left of a node's target distribution while they are refused one after another.
//
// The same rounds as kernels/specdec_kernels/ops/_proposals/reference.py and the references beside it. A node whose
// refused proposals were all chosen keeps its distribution in place: tokens are struck out and one pass sums what is
// left. The first refused drawn proposal makes a dense copy, one pass per such proposal.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "distribution/cached_row.h"
#include "sampling/gumbel_race.h"
#include "trees/tree.h"

namespace specdec {

enum Mark : int8_t { kChosen = 0, kDrawn = 1, kDrawnWithoutEarlier = 2, kDrawnWithoutChosen = 3 };

struct TreeDraft {
  const int64_t* tokens;   // [nodes], target ids
  const int32_t* offsets;  // [rows + 1]
  const int32_t *first_child, *next_sibling;
  const int8_t* proposal_kinds;  // Mark
  const int32_t* dist_index;
  const bool* score_only;  // or nullptr
  int64_t nodes, rows;
  const TokenDistributions* dists;          // nullptr if every node is chosen
  const int64_t* token_ids;  // target id of each draft column, distinct; nullptr: the same

  bool is_score_only(int64_t node) const { return score_only != nullptr && score_only[node]; }
};

struct StepNoise {
  const int64_t* seeds;
  const int32_t* root_positions;
  const float *uniforms, *block_noise, *token_noise;  // explicit, or nullptr for the keyed ones

  float coin(int64_t row, int64_t root, int64_t node) const {
    if (uniforms != nullptr) return uniforms[node];
    return uniform(random_word(Counter(seeds[row], root_positions[row], static_cast<int32_t>(node - root), kAccept), 0));
  }
  RaceNoise race(int64_t row, int32_t index, int64_t vocab) const {
    RaceNoise noise(seeds[row], root_positions[row], index, kRecover);
    if (block_noise != nullptr) {
      noise.block_noise = block_noise + row * block_count(vocab);
      noise.token_noise = token_noise + row * vocab;
    }
    return noise;
  }
};

// What is wrong with a draft, or nullptr; *at is the node (or column of token_ids).
const char* invalid_tree(const TreeDraft& draft, const TokenDistributions& target, int64_t* at);

// Depth of the deepest node, of a valid draft.
int32_t deepest(const TreeDraft& draft);

template <class Real>
class Rest {
 public:
  // exact: never take a shortcut that changes the scale of the weights.
  Rest(const TreeDraft& draft, KeptRows<Real>& rows, bool exact)
      : draft_(draft),
        target_(rows.target),
        dists_(rows.draft),
        rows_(rows),
        vocab_(target_.logits.columns),
        blocks_(block_count(vocab_)),
        dust_(target_.wide() && (draft.dists == nullptr || draft.dists->wide()) ? 0x1p-44 : 0x1p-20),
        exact_(exact) {}

  // Begins with the target's distribution after `node` and all of its proposals.
  void start(int64_t node);

  int size() const { return static_cast<int>(children_.size()); }
  int64_t child(int place) const { return children_[place]; }

  // Q(x) of a proposal; 0 if its token was not drawn from its distribution, and then it is no proposal.
  double offered(int place);
  // r(x) / Q(x), where r is the normalised distribution that is left and offered = Q(x).
  double ratio(int place, double offered) const {
    return weight(draft_.tokens[children_[place]]) / total_ / offered;
  }
  // The distribution becomes the positive part of reach * r - Q. Returns S / (S + 1 - reach) for its total S; if
  // nothing is left the distribution stays and the answer is 0, or 1 for reach 1; after a broken distribution it is
  // `reach`.
  double refuse(int place, double reach);

  // One token of what is left, 0 if there is none.
  int64_t draw(const RaceNoise& noise) const;
  void write(Real* out) const;

 private:
  struct Masked {  // total of a draft distribution outside the tokens drawn from it or chosen at this node
    int64_t row;
    bool chosen;
    double base;
    std::vector<int64_t> tokens;
  };

  double weight(int64_t token) const;
  double q_weight(int64_t row, int64_t token) const { return std::exp(dists_.log_weight(row, token)); }
  void block(int64_t b, Real* out) const;
  void find_gone(int place);
  const Masked& masked(int64_t row, bool chosen);
  double others();
  double remaining();
  double strike_out(int64_t token, double reach);
  double subtract(int place, double reach);
  static double after(double share, double reach) { return share / (share + (1.0 - reach)); }
  static double nothing_left(double reach) { return reach < 1 ? 0.0 : 1.0; }
  // Total of a block without some tokens (ascending).
  static double total_without(Real* weights, int count, int64_t first, const std::vector<int64_t>& tokens);

  const TreeDraft& draft_;
  const TokenDistributions& target_;
  const DraftDistributions& dists_;
  KeptRows<Real>& rows_;
  int64_t vocab_, blocks_;
  double dust_;
  bool exact_;

  int64_t node_ = -1;
  std::vector<int64_t> children_;
  std::vector<int64_t> chosen_;  // distinct tokens of chosen children, ascending
  std::vector<int64_t> struck_;  // struck out of the distribution in place
  std::vector<int64_t> gone_;    // tokens that the proposal at hand cannot be
  std::vector<Masked> masked_;
  double scale_ = 1;    // of the proposal's distribution, for what is gone
  double total_ = 1;    // of the distribution that is left
  double others_ = -1;  // of it, outside chosen_; negative: not summed yet
  bool dense_ = false;
  std::vector<Real> dense_weights_, spare_;
  std::vector<double> block_totals_, spare_totals_;
};

extern template class Rest<float>;
extern template class Rest<double>;

}  // namespace specdec

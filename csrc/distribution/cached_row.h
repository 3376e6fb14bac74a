// Weights of a row that is passed over again: siblings drawn from one distribution, nodes that have one distribution
// in common.
#pragma once
#include <algorithm>
#include <vector>

#include "distribution/draft_vocab.h"

namespace specdec {

// Source: Distributions or DraftDistributions. The fourth pass over a row in succession writes its weights down,
// later ones read them: most nodes make fewer, and writing is not free.
template <class Real, class Source>
class KeptRow {
 public:
  KeptRow(const Source& source, int64_t vocab) : source_(source), vocab_(vocab) {}

  // Announces a pass over all of a row.
  void pass(int64_t row) {
    if (row_ < 0 || !source_.same(row, row_)) row_ = row, passes_ = 0;
    if (++passes_ == kPasses) {
      weights_.resize(block_count(vocab_) * kRaceBlock);
      for (int64_t first = 0; first < vocab_; first += kRaceBlock)
        source_.weights(row, first, block_size(vocab_, first / kRaceBlock), weights_.data() + first);
    }
  }

  // As Source::weights.
  void weights(int64_t row, int64_t first, int count, Real* out) const {
    if (passes_ >= kPasses && source_.same(row, row_))
      std::copy_n(weights_.data() + first, (count + kPad - 1) / kPad * kPad, out);
    else
      source_.weights(row, first, count, out);
  }

 private:
  static constexpr int64_t kPasses = 4;
  const Source& source_;
  int64_t vocab_;
  int64_t row_ = -1;  // of the last pass
  int64_t passes_ = 0;  // over it, in succession
  std::vector<Real> weights_;
};

// Rows of both distributions of a tree draft, for the nodes that one thread comes to.
template <class Real>
struct KeptRows {
  const TokenDistributions& target;
  const DraftDistributions& draft;
  KeptRow<Real, TokenDistributions> p;
  KeptRow<Real, DraftDistributions> q;

  KeptRows(const TokenDistributions& target_, const DraftDistributions& draft_)
      : target(target_), draft(draft_), p(target, target.logits.columns), q(draft, target.logits.columns) {}
};

}  // namespace specdec

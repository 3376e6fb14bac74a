// Caches the weights [V] of a row that several passes read in succession: siblings sampled from one distribution, or
// nodes that share one.
#pragma once
#include <algorithm>
#include <vector>

#include "distribution/draft_vocab.h"

namespace specdec {

// Source: TokenDistributions or DraftDistributions. The fourth pass over a row in succession stores its weights and later
// passes read them. Most nodes need fewer passes, and the store costs time.
template <class Real, class Source>
class CachedRow {
 public:
  CachedRow(const Source& source, int64_t vocab) : source_(source), vocab_(vocab) {}

  // Starts a pass over a whole row.
  void pass(int64_t row) {
    if (row_ < 0 || !source_.same(row, row_)) row_ = row, passes_ = 0;
    if (++passes_ == kPasses) {
      weights_.resize(block_count(vocab_) * kVocabBlock);
      for (int64_t first = 0; first < vocab_; first += kVocabBlock)
        source_.weights(row, first, block_size(vocab_, first / kVocabBlock), weights_.data() + first);
    }
  }

  // The same as Source::weights.
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

// Cached rows of the target and the draft, for the nodes of one thread.
template <class Real>
struct CachedRows {
  const TokenDistributions& target;
  const DraftDistributions& draft;
  CachedRow<Real, TokenDistributions> p;
  CachedRow<Real, DraftDistributions> q;

  CachedRows(const TokenDistributions& target_, const DraftDistributions& draft_)
      : target(target_), draft(draft_), p(target, target.logits.columns), q(draft, target.logits.columns) {}
};

}  // namespace specdec

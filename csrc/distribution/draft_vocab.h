// Draft distributions over target ids: maps the columns [D] of a draft vocabulary to target ids [V].
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "distribution/distribution.h"

namespace specdec {

// "token_ids" if a column of a draft vocabulary has no id of the target (*at is the column), else nullptr.
inline const char* invalid_token_ids(const int64_t* token_ids, const TokenDistributions* draft, const TokenDistributions& target, int64_t* at) {
  if (token_ids == nullptr || draft == nullptr) return nullptr;
  for (int64_t c = 0; c < draft->logits.columns; ++c)
    if (token_ids[c] < 0 || token_ids[c] >= target.logits.columns) {
      *at = c;
      return "token_ids";
    }
  return nullptr;
}

// Columns of a draft vocabulary, sorted by target id.
class Columns {
 public:
  // ids: target id of each of `count` columns, distinct; nullptr: column v is id v.
  Columns(const int64_t* ids, int64_t count) : ids_(ids), count_(ids == nullptr ? 0 : count) {
    if (std::is_sorted(ids_, ids_ + count_)) return;
    order_.resize(count_);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) { return ids_[a] < ids_[b]; });
  }

  bool mapped() const { return ids_ != nullptr; }
  bool sorted() const { return order_.empty(); }
  int64_t column(int64_t place) const { return sorted() ? place : order_[place]; }
  int64_t id(int64_t column) const { return ids_[column]; }

  // First place in id order whose id is at least `id`.
  int64_t place(int64_t id) const {
    int64_t low = 0, high = count_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids_[column(middle)] < id)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Column of a target id, or -1.
  int64_t find(int64_t id) const {
    const int64_t at = place(id);
    return at < count_ && ids_[column(at)] == id ? column(at) : -1;
  }

 private:
  const int64_t* ids_;
  int64_t count_;
  std::vector<int32_t> order_;
};

// A smaller log weight counts as no weight: float32 has no normal number for it.
constexpr double kLeastLogWeight = -87.0;

// Draft distributions as weights of target ids.
class DraftDistributions {
 public:
  DraftDistributions(const TokenDistributions* dists, const int64_t* token_ids)
      : dists_(dists), columns_(dists == nullptr ? nullptr : token_ids, dists == nullptr ? 0 : dists->logits.columns) {}

  // Log weight of one target id, -inf for weight 0.
  double log_weight(int64_t row, int64_t token) const {
    const int64_t column = columns_.mapped() ? columns_.find(token) : token < dists_->logits.columns ? token : -1;
    return column < 0 ? -std::numeric_limits<double>::infinity() : dists_->log_weight(row, column);
  }

  bool same(int64_t r, int64_t s) const { return dists_->same(r, s); }

  // Weights of `count` target ids from `first` (at most one block), zero padded to a multiple of kPad.
  template <class Real>
  void weights(int64_t row, int64_t first, int count, Real* q) const {
    const int padded = (count + kPad - 1) / kPad * kPad;
    if (!columns_.mapped()) {
      const int have = static_cast<int>(std::clamp<int64_t>(dists_->logits.columns - first, 0, count));
      if (have > 0) dists_->weights(row, first, have, q);
      std::fill(q + (have + kPad - 1) / kPad * kPad, q + padded, Real{0});
      return;
    }
    std::fill(q, q + padded, Real{0});
    const int64_t begin = columns_.place(first), end = columns_.place(first + count);
    alignas(64) Real piece[kVocabBlock];
    for (int64_t at = begin; at < end; at += kVocabBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kVocabBlock, end - at));
      if (columns_.sorted()) dists_->weights(row, at, size, piece);
      for (int i = 0; i < size; ++i) {
        const int64_t column = columns_.column(at + i);
        q[columns_.id(column) - first] =
            columns_.sorted() ? piece[i] : static_cast<Real>(std::exp(dists_->log_weight(row, column)));
      }
    }
  }

 private:
  const TokenDistributions* dists_;
  Columns columns_;
};

}  // namespace specdec

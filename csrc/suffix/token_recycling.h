// For each token, the likeliest next tokens and log-probabilities that the target returned when it last scored the token.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "suffix/best_first.h"

namespace specdec::suffix {

// The distribution that growth uses: log-probabilities times inv_t, filtered by top-k, top-p and min-p (0, 1 and 0: off).
struct Filters {
  double inv_t, top_p, min_p;
  int64_t top_k;
};

class Successors {
 public:
  using Following = std::vector<std::pair<int32_t, float>>;  // (next token, log-probability), likeliest first

  // Replaces the next tokens of a token. token: 0 or more.
  void learn(int64_t token, Following following);
  const Following& after(int64_t token) const;
  // Tokens with known next tokens.
  int64_t size() const { return size_; }
  Grown grow(int64_t root, int64_t depth, const Filters& filters, const Limits& limits) const;

 private:
  int64_t size_ = 0;
  std::vector<Following> seen_;  // by token
};

}  // namespace specdec::suffix

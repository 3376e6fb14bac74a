// What the target showed behind each token when it was last scored: its likeliest next tokens with log-probabilities.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "suffix/best_first.h"

namespace specdec::suffix {

// The distribution that growth goes by: inv_t of the log-probabilities, and what top-k, top-p and min-p leave of them
// (0, 1 and 0: all).
struct Shown {
  double inv_t, top_p, min_p;
  int64_t top_k;
};

class Successors {
 public:
  using Following = std::vector<std::pair<int32_t, float>>;  // (next token, log-probability), the likeliest first

  // Replaces what was seen behind a token. token: 0 or more.
  void learn(int64_t token, Following following);
  const Following& after(int64_t token) const;
  // Tokens of which something was seen.
  int64_t size() const { return size_; }
  Grown grow(int64_t root, int64_t depth, const Shown& shown, const Limits& limits) const;

 private:
  int64_t size_ = 0;
  std::vector<Following> seen_;  // by token
};

}  // namespace specdec::suffix

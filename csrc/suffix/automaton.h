// Suffix automaton of one growing text (Blumer et al. 1985): which suffix of the text occurred before, and what followed.
#pragma once
#include <cstdint>
#include <vector>

#include "suffix/edges.h"
#include "suffix/best_first.h"

namespace specdec::suffix {

class Automaton {
 public:
  Automaton();
  // O(1) amortised. token: 0 or more.
  void append(int32_t token);
  int64_t size() const { return states_[last_].length; }
  int64_t states() const { return static_cast<int64_t>(states_.size()); }
  // Length of the longest suffix of the text that occurred in it before (the two may overlap).
  int64_t match() const { return last_ == 0 ? 0 : states_[states_[last_].link].length; }
  // How often a string of tokens occurs: exact below kCounted suffix links, else at least this.
  int64_t count(const std::vector<int32_t>& tokens) const;
  // Continuations of that suffix: of those of any context the kLooked that were added or seen again last.
  Grown grow(const Limits& limits) const;

 private:
  // Suffix links that one more occurrence is counted along: deeper chains are those of periodic texts, where the longest
  // contexts decide, and following them to the end would make an append as dear as the text is long.
  static constexpr int kCounted = 64;
  // Continuations of one context that growth looks at: behind the commonest tokens of a long text there are thousands,
  // hardly one of which has a chance.
  static constexpr size_t kLooked = 128;
  struct State {
    int32_t length, link, first_edge, count;
  };
  struct Edge {
    int32_t token, target, next, before;  // of its state's edges, the newest first
  };
  int32_t target(int32_t state, int32_t token) const {
    const int32_t edge = index_.find(state, token);
    return edge < 0 ? -1 : edges_[edge].target;
  }
  void add_edge(int32_t state, int32_t token, int32_t target);
  void put_first(int32_t state, int32_t edge);
  // An edge was seen again.
  void renew(int32_t state, int32_t edge);

  std::vector<State> states_;
  std::vector<Edge> edges_;
  Edges index_;  // -> edges_
  int32_t last_ = 0;
};

}  // namespace specdec::suffix

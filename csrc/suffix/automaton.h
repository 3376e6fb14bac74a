// Suffix automaton of one growing text (Blumer et al. 1985): the longest suffix that occurred earlier, and its continuations.
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
  // Occurrences of a string of tokens: exact below kCounted suffix links, otherwise a lower bound.
  int64_t count(const std::vector<int32_t>& tokens) const;
  // Grows a tree from the continuations of that suffix. Each context uses its kLooked most recent continuations.
  Grown grow(const Limits& limits) const;

 private:
  // An occurrence is counted along this many suffix links. Longer chains come from periodic texts, where the longest contexts
  // decide, and following them would make an append linear in the text.
  static constexpr int kCounted = 64;
  // Continuations of one context that growth reads. The most common tokens of a long text have thousands, and almost none
  // can win.
  static constexpr size_t kLooked = 128;
  struct State {
    int32_t length, link, first_edge, count;
  };
  struct Edge {
    int32_t token, target, next, before;  // in the list of the state's edges, most recent first
  };
  int32_t target(int32_t state, int32_t token) const {
    const int32_t edge = index_.find(state, token);
    return edge < 0 ? -1 : edges_[edge].target;
  }
  void add_edge(int32_t state, int32_t token, int32_t target);
  void put_first(int32_t state, int32_t edge);
  // Moves an edge to the front when it occurs again.
  void renew(int32_t state, int32_t edge);

  std::vector<State> states_;
  std::vector<Edge> edges_;
  Edges index_;  // -> edges_
  int32_t last_ = 0;
};

}  // namespace specdec::suffix

#include "suffix/automaton.h"

namespace specdec::suffix {

Automaton::Automaton() : states_{{0, -1, -1, 0}} {}

void Automaton::add_edge(int32_t state, int32_t token, int32_t target) {
  const int32_t edge = static_cast<int32_t>(edges_.size());
  index_.insert(state, token, edge);
  edges_.push_back({token, target, -1, -1});
  put_first(state, edge);
}

void Automaton::put_first(int32_t state, int32_t edge) {
  edges_[edge].next = states_[state].first_edge;
  edges_[edge].before = -1;
  if (edges_[edge].next >= 0) edges_[edges_[edge].next].before = edge;
  states_[state].first_edge = edge;
}

void Automaton::renew(int32_t state, int32_t edge) {
  if (states_[state].first_edge == edge) return;
  const Edge own = edges_[edge];
  edges_[own.before].next = own.next;
  if (own.next >= 0) edges_[own.next].before = own.before;
  put_first(state, edge);
}

void Automaton::append(int32_t token) {
  const int32_t added = static_cast<int32_t>(states_.size());
  states_.push_back({states_[last_].length + 1, 0, -1, 1});
  int32_t state = last_;
  last_ = added;
  for (; state >= 0 && index_.find(state, token) < 0; state = states_[state].link) add_edge(state, token, added);
  int renewed = 0;
  for (int32_t up = state; up >= 0 && renewed < kCounted; up = states_[up].link, ++renewed) renew(up, index_.find(up, token));
  if (state >= 0) {
    const int32_t next = target(state, token);
    if (states_[next].length == states_[state].length + 1) {
      states_[added].link = next;
    } else {  // the shorter strings of `next` now end at more positions than its longest, so they need their own state
      const int32_t clone = static_cast<int32_t>(states_.size());
      states_.push_back({states_[state].length + 1, states_[next].link, -1, states_[next].count});
      std::vector<int32_t> copied;
      for (int32_t edge = states_[next].first_edge; edge >= 0; edge = edges_[edge].next) copied.push_back(edge);
      for (auto edge = copied.rbegin(); edge != copied.rend(); ++edge) add_edge(clone, edges_[*edge].token, edges_[*edge].target);
      for (; state >= 0; state = states_[state].link) {
        const int32_t edge = index_.find(state, token);
        if (edge < 0 || edges_[edge].target != next) break;
        edges_[edge].target = clone;
      }
      states_[next].link = states_[added].link = clone;
    }
  }
  int left = kCounted;
  for (int32_t up = states_[added].link; up > 0 && left > 0; up = states_[up].link, --left) ++states_[up].count;
}

int64_t Automaton::count(const std::vector<int32_t>& tokens) const {
  int32_t state = 0;
  for (const int32_t token : tokens)
    if ((state = target(state, token)) < 0) return 0;
  return state == 0 ? size() + 1 : states_[state].count;
}

Grown Automaton::grow(const Limits& limits) const {
  Grown out;
  out.match = match();
  if (out.match < limits.min_match || out.match == 0) return out;
  const auto children = [&](int32_t state, std::vector<Continuation<int32_t>>& found) {
    for (int32_t edge = states_[state].first_edge; edge >= 0 && found.size() < kLooked; edge = edges_[edge].next)
      found.push_back({edges_[edge].token, static_cast<double>(states_[edges_[edge].target].count), edges_[edge].target});
    return unseen(found.size(), out.match);
  };
  suffix::grow(states_[last_].link, depth_of(limits, out.match), limits, children, out);
  return out;
}

}  // namespace specdec::suffix

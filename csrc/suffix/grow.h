// Best-first growth of a draft tree from counts: the same for every structure that can list a place's continuations.
#pragma once
#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

namespace specdec::suffix {

struct Limits {
  int64_t nodes;           // at most so many, root not counted
  int64_t min_match;       // shorter matches propose nothing
  double factor;           // depth is at most factor * match
  double min_probability;  // of a path
};

// A tree below the root (node 0, not listed): node i has tokens[i - 1], parents[i - 1]. expected: sum of the paths'
// probabilities, which is the number of accepted tokens if the counts tell the truth. match: tokens of the suffix.
struct Grown {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;
  double expected = 0;
  int64_t match = 0;
};

template <class Place>
struct Continuation {
  int32_t token;
  int64_t count;
  Place place;
};

// children(place, out): the continuations of a place. The likeliest path first; ties go to the elder parent, then to the
// lower token. A path's probability is the product of its tokens' shares among their siblings, or, where `base` is
// given, the path's own count as a share of that.
template <class Place, class Children>
void grow(const Place& start, int64_t depth, const Limits& limits, const Children& children, Grown& out, int64_t base = 0) {
  struct Entry {
    double probability;
    int32_t parent, token;
    int64_t depth;
    Place place;
    bool operator<(const Entry& other) const {  // std::priority_queue pops the largest
      if (probability != other.probability) return probability < other.probability;
      if (parent != other.parent) return parent > other.parent;
      return token > other.token;
    }
  };
  std::priority_queue<Entry> open;
  std::vector<Continuation<Place>> found;
  const auto push = [&](const Place& place, double probability, int32_t node, int64_t below) {
    if (below >= depth) return;
    found.clear();
    children(place, found);
    int64_t total = base;
    for (const auto& each : found) total += base > 0 ? 0 : each.count;
    for (const auto& each : found) {
      const double own = (base > 0 ? 1.0 : probability) * static_cast<double>(each.count) / static_cast<double>(total);
      if (own >= limits.min_probability) open.push({own, node, each.token, below + 1, each.place});
    }
  };
  push(start, 1.0, 0, 0);
  while (!open.empty() && static_cast<int64_t>(out.tokens.size()) < limits.nodes) {
    const Entry best = open.top();
    open.pop();
    out.tokens.push_back(best.token);
    out.parents.push_back(best.parent);
    out.expected += best.probability;
    push(best.place, best.probability, static_cast<int32_t>(out.tokens.size()), best.depth);
  }
}

inline int64_t depth_of(const Limits& limits, int64_t match) {
  return std::min(limits.nodes, std::max<int64_t>(1, static_cast<int64_t>(limits.factor * static_cast<double>(match))));
}

}  // namespace specdec::suffix

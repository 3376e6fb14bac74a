// Best-first growth of a draft tree from weights, for every structure that lists the continuations of a place. Results are
// tokens and parents [nodes] below the root.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "random.h"

namespace specdec::suffix {

// The replay noise that the target will use: a request's seed and the absolute position of the root.
struct ReplayNoise {
  int64_t seed;
  int32_t position;
};

struct Limits {
  int64_t nodes;           // at most this many, without the root
  int64_t min_match;       // shorter matches propose nothing
  double factor;           // depth is at most factor * match
  double min_probability;  // of a path
  std::optional<ReplayNoise> noise = {};
};

// A tree below the root (node 0, not listed): node i has tokens[i - 1] and parents[i - 1]. expected: the sum of path
// probabilities, that is the expected number of accepted tokens if the weights are correct. match: length of the suffix.
struct Grown {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;
  double expected = 0;
  int64_t match = 0;
};

template <class Place>
struct Continuation {
  int32_t token;
  double weight;
  Place place;
};

// The weight of unseen continuations of a match: the number of distinct seen tokens over the square of the match length
// (Witten and Bell 1991, method C, with the square as a discount).
inline double unseen(size_t kinds, int64_t match) { return static_cast<double>(kinds) / static_cast<double>(match * match); }

// Replaces each weight by the probability that the continuation wins Gumbel-max under the replay noise. With
// z = log(weight) + noise it is the share of exp(z) among the siblings, times the probability exp(-rest / exp(z)) that no
// unknown token of total weight `rest` has a higher z.
template <class Place>
void to_win_probabilities(const ReplayNoise& noise, int64_t depth, double rest, std::vector<Continuation<Place>>& found) {
  const Counter counter(noise.seed, static_cast<int32_t>(noise.position + depth), 0, kReplay);
  double total = 0;
  for (auto& each : found) {
    each.weight *= std::exp(static_cast<double>(gumbel(random_word(counter, static_cast<uint32_t>(each.token)))));
    total += each.weight;
  }
  for (auto& each : found) each.weight = each.weight > 0 ? each.weight / total * std::exp(-rest / each.weight) : 0.0;
}

// children(place, out) lists the continuations of a place and returns the weight of the unlisted ones, which matters only with
// replay noise. Paths are added in order of probability; ties go to the earlier parent, then to the lower token. A path's
// probability is the product of its tokens' shares among their siblings. With `base` and without replay noise it is the path's
// weight divided by `base`.
template <class Place, class Children>
void grow(const Place& start, int64_t depth, const Limits& limits, const Children& children, Grown& out, double base = 0) {
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
    const double rest = children(place, found);
    double total = limits.noise ? 1.0 : base;
    if (limits.noise)
      to_win_probabilities(*limits.noise, below + 1, rest, found);
    else if (base == 0)
      for (const auto& each : found) total += each.weight;
    for (const auto& each : found) {
      const double own = (limits.noise || base == 0 ? probability : 1.0) * each.weight / total;
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
  const double deep = std::min(static_cast<double>(limits.nodes), limits.factor * static_cast<double>(match));  // any factor is in range
  return std::min(limits.nodes, deep > 1 ? static_cast<int64_t>(deep) : 1);
}

}  // namespace specdec::suffix

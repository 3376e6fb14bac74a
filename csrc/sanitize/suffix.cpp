// The structures over token texts.
#include <algorithm>
#include <numeric>

#include "sanitize/random_inputs.h"
#include "suffix/array.h"
#include "suffix/automaton.h"
#include "suffix/counted_tree.h"
#include "suffix/token_recycling.h"

namespace specdec::sanitize {

using namespace specdec::suffix;

namespace {

std::vector<int32_t> text_of(Random& random, int64_t most, int64_t vocab) {
  std::vector<int32_t> text(static_cast<size_t>(between(random, 0, most)));
  for (int32_t& token : text) token = static_cast<int32_t>(between(random, 0, vocab - 1));
  return text;
}

void check_tree(const Grown& grown, const Limits& limits, uint64_t seed) {
  expect(static_cast<int64_t>(grown.tokens.size()) <= limits.nodes && grown.tokens.size() == grown.parents.size(), "a tree's size", seed);
  for (size_t i = 0; i < grown.parents.size(); ++i) expect(grown.parents[i] >= 0 && grown.parents[i] <= static_cast<int32_t>(i), "a parent", seed);
}

}  // namespace

void suffix_case(uint64_t seed) {
  Random random(seed);
  const int64_t vocab = between(random, 1, 4);
  Limits limits{between(random, 0, 9), between(random, 1, 3), 1.0, 0.05};
  if (between(random, 0, 1) == 1) limits.noise = ReplayNoise{static_cast<int64_t>(seed), static_cast<int32_t>(between(random, 0, 99))};
  Automaton automaton;
  const std::vector<int32_t> text = text_of(random, 60, vocab);
  for (const int32_t token : text) {
    automaton.append(token);
    check_tree(automaton.grow(limits), limits, seed);
  }
  expect(automaton.states() <= std::max<int64_t>(2 * automaton.size(), 1) + 1, "the number of states", seed);

  CountedTree tree(between(random, 2, 9));
  std::vector<int64_t> ids;
  for (int step = 0; step < 12; ++step) {
    if (!ids.empty() && between(random, 0, 2) == 0) {
      const size_t at = static_cast<size_t>(between(random, 0, static_cast<int64_t>(ids.size()) - 1));
      expect(tree.remove(ids[at]) && !tree.remove(ids[at]), "removal of a text", seed);
      ids.erase(ids.begin() + static_cast<int64_t>(at));
    } else {
      ids.push_back(tree.add(text_of(random, 20, vocab)));
    }
    check_tree(tree.grow(text_of(random, 12, vocab), 8, limits), limits, seed);
  }
  for (const int64_t id : ids) tree.remove(id);
  expect(tree.nodes() == 0 && tree.size() == 0, "an emptied tree", seed);

  Successors successors;
  for (size_t at = 0; at < text.size(); ++at) {
    Successors::Following following;
    for (int64_t rank = between(random, 0, 3); rank > 0; --rank) following.emplace_back(static_cast<int32_t>(between(random, 0, vocab)), -1.0f);
    successors.learn(text[at], std::move(following));
    check_tree(successors.grow(text[at], 4, {0.7, 0.9, 0.1, between(random, 0, 2)}, limits), limits, seed);
  }
  expect(successors.size() <= vocab && successors.after(vocab + 1).empty(), "the known tokens", seed);

  std::vector<uint16_t> stream;
  for (const int32_t token : text) stream.push_back(static_cast<uint16_t>(token));
  std::vector<uint32_t> order(stream.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return std::lexicographical_compare(stream.begin() + a, stream.end(), stream.begin() + b, stream.end()); });
  const Array array(stream.data(), 2, static_cast<int64_t>(stream.size()), order.data(), 4, vocab);
  std::vector<int64_t> context;
  for (const int32_t token : text_of(random, 6, vocab)) context.push_back(token);
  check_tree(look_up({&array, &array}, context, {4, 5, between(random, 1, 6), limits}), limits, seed);
}

}  // namespace specdec::sanitize

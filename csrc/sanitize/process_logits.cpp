// process_logits.
#include <limits>

#include "sanitize/random_inputs.h"
#include "sampling/process_logits.h"

namespace specdec::sanitize {
namespace {

// Offsets [rows + 1] of ragged lists.
std::vector<int32_t> lists(Random& random, int64_t rows) {
  std::vector<int32_t> offsets{0};
  for (int64_t b = 0; b < rows; ++b) offsets.push_back(offsets.back() + static_cast<int32_t>(between(random, 0, 4)));
  return offsets;
}

// Token ids, some outside the vocabulary.
template <class T>
std::vector<T> ids(Random& random, int64_t count, int64_t vocab) {
  std::vector<T> found;
  for (int64_t i = 0; i < count; ++i) found.push_back(static_cast<T>(between(random, -2, vocab + 2)));
  return found;
}

}  // namespace

void process_logits_case(uint64_t seed) {
  Random random(seed);
  const std::vector<Scalar> types{Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64};
  const int64_t vocab = one_of<int64_t>(random, {1, 2, 31, 32, 33, 300, 70001});
  const Trees trees(random, between(random, 1, 4), 7);
  const int64_t nodes = trees.nodes(), rows = trees.rows(), logit_rows = seed % 2 ? nodes : between(random, 0, nodes);
  const Scalar type = one_of(random, types);
  const Block logits(type, logit_rows * vocab, random);

  const std::vector<int64_t> tokens = ids<int64_t>(random, nodes, vocab);
  std::vector<int32_t> roots(rows), follows(logit_rows), table_rows(rows), sizes(rows + 1), index(logit_rows);
  std::vector<float> factors;
  const int64_t capacity = between(random, 0, 9), masks = between(random, 1, 3), width = (vocab + 31) / 32;
  for (auto& root : roots) root = static_cast<int32_t>(between(random, 0, 5));
  for (auto& follow : follows) follow = static_cast<int32_t>(between(random, 0, nodes - 1));
  for (auto& row : table_rows) row = static_cast<int32_t>(between(random, 0, rows));
  for (auto& size : sizes) size = static_cast<int32_t>(between(random, 0, capacity));
  for (auto& mask : index) mask = static_cast<int32_t>(between(random, -1, masks - 1));
  for (int64_t b = 0; b < rows; ++b) factors.insert(factors.end(), {1.3f, 0.5f, b % 2 ? -0.25f : 0.0f});
  const std::vector<int32_t> known = ids<int32_t>(random, (rows + 1) * capacity, vocab), counts((rows + 1) * capacity, 2);
  const std::vector<int32_t> add_offsets = lists(random, rows), forced_offsets = lists(random, rows);
  const std::vector<int32_t> add_ids = ids<int32_t>(random, add_offsets.back(), vocab), until(add_offsets.back(), 6);
  const std::vector<int32_t> forced_ids = ids<int32_t>(random, forced_offsets.back(), vocab), positions(forced_offsets.back(), 3);
  std::vector<float> values;
  for (int32_t i = 0; i < add_offsets.back(); ++i) values.push_back(i % 2 ? 1.5f : -std::numeric_limits<float>::infinity());
  std::vector<int32_t> words;
  for (int64_t i = 0; i < masks * width; ++i) words.push_back(static_cast<int32_t>(random()));

  LogitsProcessors processors{};
  processors.paths = {tokens.data(), trees.parents.data(), trees.offsets.data(), roots.data(), seed % 2 ? nullptr : follows.data(), nodes, rows};
  if (seed % 3) processors.penalties = {factors.data(), table_rows.data(), known.data(), counts.data(), sizes.data(), rows + 1, capacity};
  if (seed % 5) processors.additions = {add_offsets.data(), add_ids.data(), values.data(), until.data(), add_offsets.back()};
  if (seed % 4) processors.forced = {forced_offsets.data(), positions.data(), forced_ids.data(), forced_offsets.back()};
  if (seed % 7) processors.masks = {words.data(), index.data(), masks, width};
  const Matrix matrix{logits.data(), logit_rows, vocab, vocab, type};
  int64_t at = 0;
  expect(invalid_processors(matrix, processors, &at) == nullptr, "valid processors", seed);
  process_logits(matrix, processors);
  if (processors.masks.words != nullptr) {
    for (int64_t r = 0; r < logit_rows; ++r) {
      if (index[r] < 0) continue;
      for (int64_t v = 0; v < vocab; ++v) {
        const bool allowed = static_cast<uint32_t>(words[index[r] * width + v / 32]) >> (v % 32) & 1;
        expect(allowed || logits.get(r * vocab + v) == -std::numeric_limits<double>::infinity(), "a masked token", seed);
      }
    }
  }
}

}  // namespace specdec::sanitize

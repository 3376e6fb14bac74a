// ngram_match.
#include <algorithm>

#include "ngram/match.h"
#include "sanitize/random_inputs.h"

namespace specdec::sanitize {

void ngram_case(uint64_t seed) {
  Random random(seed);
  const int64_t rows = between(random, 0, 20), vocab = between(random, 1, 4);
  std::vector<int64_t> tokens, starts;
  std::vector<int32_t> lengths;
  for (int64_t b = 0; b < rows; ++b) {
    starts.push_back(static_cast<int64_t>(tokens.size()));
    lengths.push_back(static_cast<int32_t>(between(random, 0, 30)));
    for (int32_t i = 0; i < lengths.back(); ++i) tokens.push_back(between(random, 0, vocab - 1));
  }
  tokens.shrink_to_fit();
  const int64_t n_min = between(random, 1, 3), n_max = n_min + between(random, 0, 3), wanted = between(random, 0, 12);
  std::vector<int64_t> drafts(static_cast<size_t>(rows * wanted), -2);
  std::vector<int32_t> matched(static_cast<size_t>(rows), -2);
  const Histories in{tokens.data(), starts.data(), lengths.data(), rows, static_cast<int64_t>(tokens.size())};
  expect(ngram_match(in, {n_max, n_min, wanted, seed % 2 == 0}, drafts.data(), matched.data()) == -1, "ngram_match", seed);
  for (const int32_t size : matched) expect(size == 0 || (size >= n_min && size <= n_max), "the length of a match", seed);
  for (const int64_t token : drafts) expect(token >= -1 && token < vocab, "a copied token", seed);
  if (rows > 0) {
    ++lengths.back();
    expect(ngram_match(in, {n_max, n_min, wanted, false}, drafts.data(), matched.data()) == rows - 1, "the rejection of a long history", seed);
  }
}

}  // namespace specdec::sanitize

// ngram_match: what followed the longest suffix of a token history that occurred in it before.
#pragma once
#include <cstdint>

namespace specdec {

struct Histories {
  const int64_t *tokens, *starts;  // history b is tokens[starts[b] .. starts[b] + lengths[b])
  const int32_t* lengths;
  int64_t rows, size;  // of tokens
};

struct NgramSizes {
  int64_t n_max, n_min, num_tokens;
  bool frequent;  // copy the last occurrence of the commonest next token instead of the last occurrence
};

// drafts: [rows, num_tokens], -1 where nothing matched; matched: [rows]. Returns -1, or a row that leaves the tokens.
int64_t ngram_match(const Histories& in, const NgramSizes& sizes, int64_t* drafts, int32_t* matched);

}  // namespace specdec

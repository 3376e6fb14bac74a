// ngram_match: for each of B token histories, the continuation of its longest suffix that occurs earlier in it.
#pragma once
#include <cstdint>

namespace specdec {

struct Histories {
  const int64_t *tokens, *starts;  // history b is tokens[starts[b] .. starts[b] + lengths[b]); [N], [B]
  const int32_t* lengths;           // [B]
  int64_t rows, size;               // B, N
};

// Suffixes of n_min to n_max tokens are matched; num_tokens are copied.
struct NgramSizes {
  int64_t n_max, n_min, num_tokens;
  bool frequent;  // copy the last occurrence of the commonest next token instead of the last occurrence
};

// drafts: [B, num_tokens], -1 without a match. matched: [B], the length of the match. Returns -1, or a history that exceeds
// the tokens.
int64_t ngram_match(const Histories& in, const NgramSizes& sizes, int64_t* drafts, int32_t* matched);

}  // namespace specdec

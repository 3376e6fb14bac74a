// Look-ups in a token stream [size] through its suffix array [size]: ranges by binary search, continuations from a range.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "suffix/best_first.h"

namespace specdec::suffix {

// A stream of tokens of 2 or 4 bytes and its suffix array of 4 or 8 bytes, in the caller's memory (a mapped file). Tokens
// >= separator end a document, and no match or continuation crosses them.
class Array {
 public:
  Array(const void* tokens, int width, int64_t size, const void* suffixes, int index_width, int64_t separator)
      : tokens_(tokens), suffixes_(suffixes), size_(size), separator_(separator), wide_tokens_(width == 4), wide_index_(index_width == 8) {}

  int64_t size() const { return size_; }

  // The ranks [low, high) whose suffixes start with `count` tokens.
  std::pair<int64_t, int64_t> range(const int64_t* tokens, int64_t count) const {
    return {bound(tokens, count, false), bound(tokens, count, true)};
  }

  // Position in the stream of suffix `rank`. Throws std::out_of_range if the array is damaged.
  int64_t position(int64_t rank) const {
    const int64_t at = wide_index_ ? static_cast<const int64_t*>(suffixes_)[rank] : static_cast<int64_t>(static_cast<const uint32_t*>(suffixes_)[rank]);
    if (at < 0 || at >= size_) throw std::out_of_range("suffix array");
    return at;
  }

  // Token at a position, or -1 at the end of a document.
  int64_t token(int64_t at) const {
    if (at >= size_) return -1;
    const int64_t found = wide_tokens_ ? static_cast<int64_t>(static_cast<const uint32_t*>(tokens_)[at]) : static_cast<int64_t>(static_cast<const uint16_t*>(tokens_)[at]);
    return found >= separator_ ? -1 : found;
  }

 private:
  // First rank whose suffix is not below the string or, with `after`, is above all suffixes that start with it.
  int64_t bound(const int64_t* tokens, int64_t count, bool after) const {
    int64_t low = 0, high = size_;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      const int order = compare(position(middle), tokens, count);
      if (order < 0 || (after && order == 0))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Order of the suffix at a position relative to a string; 0 if it starts with the string. Separators sort above all tokens.
  int compare(int64_t at, const int64_t* tokens, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (at + i >= size_) return -1;  // a shorter suffix comes first
      const int64_t own = token(at + i);
      if (own == tokens[i]) continue;
      return own >= 0 && own < tokens[i] ? -1 : 1;
    }
    return 0;
  }

  const void *tokens_, *suffixes_;
  int64_t size_, separator_;
  bool wide_tokens_, wide_index_;
};

struct LookUp {
  int64_t max_match, depth;  // longest suffix of the context; longest continuation
  int64_t samples;           // at most this many positions of each array are read, evenly spread over its range
  Limits limits;
};

// Continuations of the longest suffix of a context that any array contains, counted over all arrays.
Grown look_up(const std::vector<const Array*>& arrays, const std::vector<int64_t>& context, const LookUp& how);

}  // namespace specdec::suffix

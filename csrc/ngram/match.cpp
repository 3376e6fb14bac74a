#include "ngram/match.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

// The position after the occurrence to copy, or 0. *matched is the length of the match.
int64_t find_match(const int64_t* history, int64_t length, const NgramSizes& sizes, std::vector<int64_t>& ends, int64_t* matched) {
  const int64_t last = length - 1;
  int64_t longest = sizes.n_min - 1, position = 0;
  ends.clear();
  for (int64_t end = last; end > 0 && (sizes.frequent ? end >= longest : end > longest); --end) {
    // Most positions fail at their newest token.
    if (history[end - 1] != history[last]) continue;
    const int64_t most = std::min(sizes.n_max, end);
    int64_t same = 1;
    while (same < most && history[end - 1 - same] == history[last - same]) ++same;
    if (same > longest) {
      longest = same;
      position = end;
      ends.clear();
      if (same == sizes.n_max && !sizes.frequent) break;
    }
    if (sizes.frequent && same == longest && position > 0) ends.push_back(end);
  }
  *matched = position > 0 ? longest : 0;
  if (ends.size() > 1) {  // newest first, so the most recent token wins among equal counts
    std::unordered_map<int64_t, int64_t> counts;
    for (const int64_t end : ends) ++counts[history[end]];
    int64_t best = 0;
    for (const int64_t end : ends)
      if (counts[history[end]] > best) best = counts[history[end]], position = end;
  }
  return position;
}

}  // namespace

int64_t ngram_match(const Histories& in, const NgramSizes& sizes, int64_t* drafts, int32_t* matched) {
  for (int64_t b = 0; b < in.rows; ++b)
    if (in.starts[b] < 0 || in.lengths[b] < 0 || in.starts[b] > in.size - in.lengths[b]) return b;
  parallel_for(0, in.rows, 8, [&](int64_t first, int64_t stop) {
    std::vector<int64_t> ends;
    for (int64_t b = first; b < stop; ++b) {
      const int64_t* history = in.tokens + in.starts[b];
      const int64_t length = in.lengths[b];
      int64_t* own = drafts + b * sizes.num_tokens;
      int64_t size = 0;
      const int64_t position = length > 1 ? find_match(history, length, sizes, ends, &size) : 0;
      matched[b] = static_cast<int32_t>(size);
      if (position == 0) {
        std::fill_n(own, sizes.num_tokens, -1);
        continue;
      }
      for (int64_t i = 0; i < sizes.num_tokens; ++i) own[i] = position + i < length ? history[position + i] : own[i - (length - position)];
    }
  });
  return -1;
}

}  // namespace specdec

#include "suffix/array.h"

#include <map>

namespace specdec::suffix {
namespace {

// A sorted range of suffixes of one array that share `depth` tokens after the match, evenly sampled.
struct Range {
  const Array* array;
  int64_t first, ranks, samples;  // ranks [first, first + ranks) of the array, of which `samples` are read
  int64_t low, high;              // of the samples

  int64_t position(int64_t sample) const { return array->position(first + static_cast<int64_t>(static_cast<__int128>(sample) * ranks / samples)); }
};

struct Place {
  int64_t depth;
  std::vector<Range> ranges;
};

}  // namespace

Grown look_up(const std::vector<const Array*>& arrays, const std::vector<int64_t>& context, const LookUp& how) {
  Grown out;
  const int64_t size = static_cast<int64_t>(context.size());
  const auto found = [&](int64_t match) {
    std::vector<Range> ranges;
    for (const Array* array : arrays) {
      const auto [first, last] = array->range(context.data() + size - match, match);
      const int64_t ranks = last - first, samples = std::min(ranks, how.samples);
      if (ranks > 0) ranges.push_back({array, first, ranks, samples, 0, samples});
    }
    return ranges;
  };
  int64_t low = 0, high = std::min(how.max_match, size);
  Place start{0, {}};
  // If a suffix occurs, its shorter suffixes occur too. The shortest allowed one is first, because most misses end here.
  if (how.limits.min_match > high) return out;
  for (int64_t middle = how.limits.min_match; low < high; middle = (low + high + 1) / 2) {
    std::vector<Range> ranges = found(middle);
    if (!ranges.empty()) {
      low = middle;
      start.ranges = std::move(ranges);
    } else {
      high = middle - 1;
      if (high < how.limits.min_match) return out;
    }
  }
  out.match = start.depth = low;
  int64_t base = 0;
  for (const Range& range : start.ranges) base += range.samples;
  const auto children = [&](const Place& place, std::vector<Continuation<Place>>& list) {
    std::map<int64_t, Continuation<Place>> by_token;
    for (const Range& range : place.ranges) {
      for (int64_t at = range.low, end; at < range.high; at = end) {  // samples are sorted, so equal tokens are adjacent
        const int64_t token = range.array->token(range.position(at) + place.depth);
        int64_t high = range.high, reach = 1;
        end = at + 1;
        while (end < range.high) {  // exponential search, then binary search
          const int64_t next = std::min(at + reach, range.high - 1);
          if (range.array->token(range.position(next) + place.depth) != token) {
            high = next;
            break;
          }
          end = next + 1;
          reach *= 2;
        }
        while (end < high) {
          const int64_t middle = end + (high - end) / 2;
          if (range.array->token(range.position(middle) + place.depth) == token)
            end = middle + 1;
          else
            high = middle;
        }
        if (token < 0) continue;  // the document ends here
        Continuation<Place>& own = by_token.try_emplace(token, Continuation<Place>{static_cast<int32_t>(token), 0.0, {place.depth + 1, {}}}).first->second;
        own.weight += static_cast<double>(end - at);
        own.place.ranges.push_back({range.array, range.first, range.ranks, range.samples, at, end});
      }
    }
    for (auto& [token, own] : by_token) list.push_back(std::move(own));
    return unseen(list.size(), out.match);
  };
  suffix::grow(start, std::min(how.depth, how.limits.nodes), how.limits, children, out, static_cast<double>(base));
  return out;
}

}  // namespace specdec::suffix

// float64 attention: plain loops, one query at a time, for tests and exact comparisons.
#include <cmath>
#include <limits>

#include "attention/tree_attention.h"
#include "attention/visibility.h"

namespace specdec {
namespace {

double score(const AttentionArguments& a, const double* query, const double* key) {
  double sum = 0.0;
  for (int64_t d = 0; d < a.head_dim; ++d) sum += query[d] * key[d];
  sum *= a.scale;
  return a.softcap != 0.0 ? a.softcap * std::tanh(sum / a.softcap) : sum;
}

}  // namespace

void attend_double(const AttentionArguments& a, int64_t row, int64_t node, int64_t head, double* scores) {
  const int64_t packed = a.offsets[row] + node, kv_head = head / (a.heads / a.kv_heads);
  const int64_t end = a.lengths[row] + (a.offsets[row + 1] - a.offsets[row]);
  const int32_t* table = a.page_table + row * a.pages_per_row;
  const double* query = static_cast<const double*>(a.query) + packed * a.query_node + head * a.query_head;
  const double* keys = static_cast<const double*>(a.keys) + kv_head * a.key_head;
  const double* values = static_cast<const double*>(a.values) + kv_head * a.value_head;
  double* out = static_cast<double*>(a.out) + packed * a.out_node + head * a.out_head;
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  double max = a.sinks != nullptr ? sink_of(a, head) : kHidden;
  const double sink = max;
  for (int64_t block = 0; block < end; block += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, end - block);
    const uint64_t visible = visible_keys(a, row, node, block, count);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t s = block + t;
      scores[s] = visible >> t & 1 ? score(a, query, keys + table[s / a.page_size] * a.key_page + s % a.page_size * a.key_slot) : kHidden;
      max = scores[s] > max || scores[s] != scores[s] ? scores[s] : max;
    }
  }
  double sum = a.sinks != nullptr && max != kHidden ? std::exp(sink - max) : 0.0;
  for (int64_t d = 0; d < a.head_dim; ++d) out[d] = 0.0;
  for (int64_t s = 0; s < end; ++s) {
    if (scores[s] == kHidden) continue;
    const double weight = std::exp(scores[s] - max);
    const double* value = values + table[s / a.page_size] * a.value_page + s % a.page_size * a.value_slot;
    sum += weight;
    for (int64_t d = 0; d < a.head_dim; ++d) out[d] += weight * value[d];
  }
  if (sum != 0.0) {
    for (int64_t d = 0; d < a.head_dim; ++d) out[d] /= sum;
  }
  if (a.lse != nullptr) static_cast<double*>(a.lse)[packed * a.heads + head] = sum == 0.0 ? kHidden : max + std::log(sum);
}

}  // namespace specdec

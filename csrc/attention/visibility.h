// The keys that a tree node may see, as bits for a block of at most 64 keys.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/tree_attention.h"

namespace specdec {

inline uint64_t low_bits(int64_t count) { return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1; }

// 64 bits of a bit string of 32-bit words, from bit `offset` (which may be negative); bits outside are 0.
inline uint64_t extract_bits(const int32_t* words, int64_t count, int64_t offset) {
  if (offset < 0) return offset <= -64 ? 0 : extract_bits(words, count, 0) << -offset;
  uint64_t bits = 0;
  const int64_t first = offset >> 5, shift = offset & 31;
  for (int64_t w = 0; w < 3 && first + w < count; ++w) {
    const uint64_t word = static_cast<uint32_t>(words[first + w]);
    const int64_t at = 32 * w - shift;
    if (at < 64) bits |= at >= 0 ? word << at : word >> -at;
  }
  return bits;
}

inline int64_t query_position(const AttentionArguments& a, int64_t row, int64_t node) {
  const bool by_depth = a.ancestors != nullptr && a.depth != nullptr;
  return a.lengths[row] + (by_depth ? a.depth[a.offsets[row] + node] : node);
}

// Bit t is set iff node `node` of row `row` sees the key in slot block + t, for t < count.
inline uint64_t visible_keys(const AttentionArguments& a, int64_t row, int64_t node, int64_t block, int64_t count) {
  const int64_t length = a.lengths[row], first_node = a.offsets[row];
  const int64_t committed = std::clamp<int64_t>(length - block, 0, 64);
  uint64_t bits = low_bits(committed);
  if (committed < count) {
    if (a.ancestors == nullptr) {
      bits |= low_bits(length + node + 1 - block);
    } else {
      bits |= extract_bits(a.ancestors + (first_node + node) * a.words, a.words, block - length);
    }
  }
  bits &= low_bits(count);
  if (a.window > 0 && bits != 0) {
    const int64_t oldest = query_position(a, row, node) - a.window + 1;  // first visible position
    if (a.ancestors == nullptr) {
      bits &= ~low_bits(oldest - block);
    } else {
      const uint64_t of_nodes = bits & ~low_bits(committed);
      bits &= ~low_bits(std::min(oldest - block, committed));
      for (uint64_t rest = of_nodes; rest != 0 && oldest > length; rest &= rest - 1) {
        const int64_t t = __builtin_ctzll(rest);
        if (query_position(a, row, block + t - length) < oldest) bits &= ~(uint64_t{1} << t);
      }
    }
  }
  return bits;
}

// The nodes that a node sees, as bits; for rows of at most 64 nodes.
inline uint64_t visible_nodes(const AttentionArguments& a, int64_t row, int64_t node) {
  return extract_bits(a.ancestors + (a.offsets[row] + node) * a.words, a.words, 0);
}

// Whether a node sees other nodes than the first ones of its row, so that its keys are not in the slots of a chain's keys.
inline bool on_branch(const AttentionArguments& a, int64_t row, int64_t node) {
  const uint64_t seen = visible_nodes(a, row, node);
  return (seen & (seen + 1)) != 0;
}

// Slots of the keys at places block, block + 1, ... of a node, and whether it sees them (bits). Places count the committed
// keys and then the nodes that it sees, as a chain of these nodes would have its keys.
inline int64_t places_of_keys(const AttentionArguments& a, int64_t row, int64_t node, int64_t block, int64_t* slots, uint64_t& visible) {
  const int64_t length = a.lengths[row], oldest = a.window > 0 ? query_position(a, row, node) - a.window + 1 : 0;
  uint64_t seen = visible_nodes(a, row, node);
  for (int64_t skip = block - length; skip > 0 && seen != 0; --skip) seen &= seen - 1;
  int64_t count = 0;
  visible = 0;
  const auto add = [&](int64_t slot, int64_t position) {
    if (position >= oldest) visible |= uint64_t{1} << count;
    slots[count++] = slot;
  };
  for (int64_t slot = block; slot < length && count < kKeyBlock; ++slot) add(slot, slot);
  for (; seen != 0 && count < kKeyBlock; seen &= seen - 1) {
    const int64_t other = __builtin_ctzll(seen);
    add(length + other, query_position(a, row, other));
  }
  return count;
}

}  // namespace specdec

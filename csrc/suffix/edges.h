// Hash map (node, token) -> value for the structures over token texts: open addressing with linear probing, and deletion
// without tombstones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace specdec::suffix {

class Edges {
 public:
  // The value of an edge, or -1.
  int32_t find(int32_t node, int32_t token) const {
    const uint64_t wanted = key(node, token);
    for (size_t at = place(wanted);; at = (at + 1) & mask()) {
      if (slots_[at].second < 0) return -1;
      if (slots_[at].first == wanted) return slots_[at].second;
    }
  }

  // Adds a new edge. value: 0 or more.
  void insert(int32_t node, int32_t token, int32_t value) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    put(key(node, token), value);
    ++used_;
  }

  // Removes an existing edge. Displaced entries move up.
  void erase(int32_t node, int32_t token) {
    const uint64_t wanted = key(node, token);
    size_t hole = place(wanted);
    while (slots_[hole].first != wanted) hole = (hole + 1) & mask();
    for (size_t at = (hole + 1) & mask(); slots_[at].second >= 0; at = (at + 1) & mask()) {
      const size_t home = place(slots_[at].first);
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;  // its home is behind the hole
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole].second = -1;
    --used_;
  }

  size_t size() const { return used_; }

 private:
  static uint64_t key(int32_t node, int32_t token) { return static_cast<uint64_t>(static_cast<uint32_t>(node)) << 32 | static_cast<uint32_t>(token); }
  size_t mask() const { return slots_.size() - 1; }
  size_t place(uint64_t key) const { return static_cast<size_t>((key * 0x9E3779B97F4A7C15ull) >> 24) & mask(); }
  void put(uint64_t key, int32_t value) {
    size_t at = place(key);
    while (slots_[at].second >= 0) at = (at + 1) & mask();
    slots_[at] = {key, value};
  }
  void grow() {
    std::vector<std::pair<uint64_t, int32_t>> old(2 * slots_.size(), {0, -1});
    old.swap(slots_);
    for (const auto& [key, value] : old)
      if (value >= 0) put(key, value);
  }

  std::vector<std::pair<uint64_t, int32_t>> slots_ = std::vector<std::pair<uint64_t, int32_t>>(64, {0, -1});
  size_t used_ = 0;
};

}  // namespace specdec::suffix

// kv_slots: slot and position of every staged node of a packed batch, on plain pointers.
#pragma once
#include <cstdint>
#include <cstring>

namespace specdec {

struct SlotArguments {
  const int32_t* page_table;              // [capacity, pages_per_row]
  int32_t* lengths;                       // [capacity], written only with `advance`
  const int32_t *rows, *offsets, *depth;  // [batch], [batch + 1], [nodes] (nullptr: causal)
  int64_t capacity, pages_per_row, batch, nodes, page_size;
  bool advance;  // commit the nodes in place
};

struct SlotOutputs {
  int32_t *page_table, *lengths;  // [batch, pages_per_row] and [batch], of the batch's rows
  int64_t *slots, *positions;     // [nodes]
};

// Fills `out`. Returns -1, or the first batch row with an invalid row id, offset, length or page table.
inline int64_t place_nodes(const SlotArguments& in, const SlotOutputs& out) {
  for (int64_t b = 0; b < in.batch; ++b) {
    const int64_t row = in.rows[b];
    if (row < 0 || row >= in.capacity) return b;
    const int32_t* table = in.page_table + row * in.pages_per_row;
    std::memcpy(out.page_table + b * in.pages_per_row, table, sizeof(int32_t) * in.pages_per_row);
    const int64_t length = out.lengths[b] = in.lengths[row], first = in.offsets[b], last = in.offsets[b + 1];
    if (first < 0 || (b == 0 && first != 0) || last < first || last > in.nodes) return b;
    if (last > first && (length < 0 || length + (last - first) > in.pages_per_row * in.page_size)) return b;
    for (int64_t node = first; node < last; ++node) {
      const int64_t at = length + node - first;
      out.slots[node] = static_cast<int64_t>(table[at / in.page_size]) * in.page_size + at % in.page_size;
      out.positions[node] = in.depth != nullptr ? length + in.depth[node] : at;
    }
  }
  for (int64_t b = 0; in.advance && b < in.batch; ++b) in.lengths[in.rows[b]] = out.lengths[b] + in.offsets[b + 1] - in.offsets[b];
  for (int64_t node = in.batch > 0 ? in.offsets[in.batch] : 0; node < in.nodes; ++node) {
    out.slots[node] = -1;  // the trash page
    out.positions[node] = 0;
  }
  return -1;
}

}  // namespace specdec

// Where the staged nodes of a packed batch go: slot and position of every node, in terms of plain pointers.
#pragma once
#include <cstdint>
#include <cstring>

namespace specdec {

struct SlotArguments {
  const int32_t* page_table;
  int32_t* lengths;                      // written to only with `advance`
  const int32_t *rows, *offsets, *depth;  // depth may be null: causal
  int64_t capacity, pages_per_row, batch, nodes, page_size;
  bool advance;  // commit the nodes where they lie
};

struct SlotOutputs {
  int32_t *page_table, *lengths;  // of the batch's rows, [batch, pages_per_row] and [batch]
  int64_t *slots, *positions;     // [nodes]
};

// Index of the first batch row that does not fit (row id, offsets, length or page table), or -1.
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

// torch.ops.specdec.kv_slots: schema and CPU implementation.
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "kv_cache/slots.h"

namespace specdec::bindings {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> kv_slots(
    Tensor page_table, Tensor lengths, Tensor rows, Tensor offsets, std::optional<Tensor> depth, int64_t nodes, int64_t page_size,
    bool advance) {
  const int64_t batch = rows.numel();
  SPECDEC_CHECK(page_table.dim() == 2 && lengths.numel() == page_table.size(0) && offsets.numel() == batch + 1 && nodes >= 0 && page_size >= 1 &&
                    (!depth.has_value() || depth->numel() == nodes),
                "kv_slots: page_table ", shape_of(page_table), ", lengths ", shape_of(lengths), ", rows ", shape_of(rows), ", offsets ",
                shape_of(offsets), " do not fit ", nodes, " nodes; expected [R, P], [R], [B], [B + 1], and depth [nodes] or None");
  const Tensor table = empty({batch, page_table.size(1)}, ScalarType::Int), own_lengths = empty({batch}, ScalarType::Int);
  const Tensor slots = empty({nodes}, ScalarType::Long), positions = empty({nodes}, ScalarType::Long);
  const SlotArguments in{input<int32_t>(page_table, "kv_slots: page_table"),
                         output<int32_t>(lengths, "kv_slots: lengths"),
                         input<int32_t>(rows, "kv_slots: rows"),
                         input<int32_t>(offsets, "kv_slots: offsets"),
                         depth.has_value() ? input<int32_t>(*depth, "kv_slots: depth") : nullptr,
                         page_table.size(0), page_table.size(1), batch, nodes, page_size, advance};
  const int64_t bad = place_nodes(in, {static_cast<int32_t*>(table.mutable_data_ptr()), static_cast<int32_t*>(own_lengths.mutable_data_ptr()),
                                       static_cast<int64_t*>(slots.mutable_data_ptr()), static_cast<int64_t*>(positions.mutable_data_ptr())});
  SPECDEC_CHECK(bad < 0, "kv_slots: row ", bad, " of the batch does not fit: expected row ids below ", page_table.size(0),
                ", non-decreasing offsets up to ", nodes, " and at most ", page_table.size(1) * page_size, " tokens a row");
  return {table, own_lengths, slots, positions};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "kv_slots(Tensor page_table, Tensor(a!) lengths, Tensor rows, Tensor offsets, Tensor? depth, int nodes, "
      "int page_size, bool advance=False) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("kv_slots", TORCH_BOX(&specdec::bindings::kv_slots)); }

// torch.ops.specdec.process_logits: schema and CPU implementation. The Python reference repeats failed checks with
// longer messages.
#include "bindings/arguments.h"
#include "sampling/process_logits.h"

namespace specdec::bindings {
namespace {

using Maybe = std::optional<Tensor>;

template <class T>
const T* sized(const Maybe& tensor, int64_t count, const char* what) {
  SPECDEC_CHECK(tensor.has_value(), "process_logits: ", what, " is missing");
  SPECDEC_CHECK(tensor->numel() == count, "process_logits: ", what, " has shape ", shape_of(*tensor), ", expected ", count, " elements");
  return input<T>(*tensor, what);
}

void process_logits_cpu(
    Tensor logits, Tensor tokens, Tensor parents, Tensor offsets, Tensor roots, Maybe nodes, Maybe factors, Maybe rows, Maybe ids, Maybe counts,
    Maybe sizes, Maybe add_offsets, Maybe add_ids, Maybe add_values, Maybe add_until, Maybe forced_offsets, Maybe forced_positions,
    Maybe forced_ids, Maybe words, Maybe mask_index) {
  SPECDEC_CHECK(logits.dim() == 2 && logits.size(1) >= 1, "process_logits: logits has shape ", shape_of(logits), ", expected [R, V]");
  SPECDEC_CHECK(logits.size(1) == 1 || logits.stride(1) == 1, "process_logits: logits is not contiguous in its last dimension");
  const Matrix matrix{logits.const_data_ptr(), logits.size(0), logits.size(1), logits.stride(0), scalar_of(logits, "process_logits: logits")};
  const int64_t count = tokens.numel(), requests = offsets.numel() - 1;
  SPECDEC_CHECK(requests >= 0 && (nodes.has_value() || count == matrix.rows), "process_logits: tokens ", shape_of(tokens), " and offsets ",
                shape_of(offsets), " do not fit logits ", shape_of(logits), "; expected one node per row, or nodes");
  LogitsProcessors processors{};
  processors.paths = {input<int64_t>(tokens, "process_logits: tokens"),
                 sized<int32_t>(parents, count, "parents"),
                 input<int32_t>(offsets, "process_logits: offsets"),
                 sized<int32_t>(roots, requests, "roots"),
                 nodes.has_value() ? sized<int32_t>(nodes, matrix.rows, "nodes") : nullptr,
                 count,
                 requests};
  if (factors.has_value()) {
    SPECDEC_CHECK(ids.has_value() && ids->dim() == 2, "process_logits: penalties ids is not [T, C]");
    const int64_t table = ids->size(0), capacity = ids->size(1);
    processors.penalties = {sized<float>(factors, 3 * requests, "penalties factors"), sized<int32_t>(rows, requests, "penalties rows"),
                       input<int32_t>(*ids, "process_logits: penalties ids"), sized<int32_t>(counts, table * capacity, "penalties counts"),
                       sized<int32_t>(sizes, table, "penalties sizes"), table, capacity};
  }
  if (add_offsets.has_value()) {
    const int64_t entries = add_ids.has_value() ? add_ids->numel() : 0;
    processors.additions = {sized<int32_t>(add_offsets, requests + 1, "additions offsets"), sized<int32_t>(add_ids, entries, "additions ids"),
                       sized<float>(add_values, entries, "additions values"), sized<int32_t>(add_until, entries, "additions until"), entries};
  }
  if (forced_offsets.has_value()) {
    const int64_t entries = forced_ids.has_value() ? forced_ids->numel() : 0;
    processors.forced = {sized<int32_t>(forced_offsets, requests + 1, "forced offsets"), sized<int32_t>(forced_positions, entries, "forced positions"),
                    sized<int32_t>(forced_ids, entries, "forced ids"), entries};
  }
  if (words.has_value()) {
    SPECDEC_CHECK(words->dim() == 2 && 32 * words->size(1) >= matrix.columns, "process_logits: masks words has shape ", shape_of(*words),
                  ", expected [K, at least V / 32]");
    processors.masks = {input<int32_t>(*words, "process_logits: masks words"), sized<int32_t>(mask_index, matrix.rows, "masks index"), words->size(0),
                   words->size(1)};
  }
  int64_t at = 0;
  const char* bad = invalid_processors(matrix, processors, &at);
  SPECDEC_CHECK(bad == nullptr, "process_logits: ", bad, "[", at, "] is out of range");
  process_logits(matrix, processors);
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "process_logits(Tensor(a!) logits, Tensor tokens, Tensor parents, Tensor offsets, Tensor roots, Tensor? nodes, "
      "Tensor? factors, Tensor? rows, Tensor? ids, Tensor? counts, Tensor? sizes, "
      "Tensor? add_offsets, Tensor? add_ids, Tensor? add_values, Tensor? add_until, "
      "Tensor? forced_offsets, Tensor? forced_positions, Tensor? forced_ids, Tensor? words, Tensor? mask_index) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("process_logits", TORCH_BOX(&specdec::bindings::process_logits_cpu)); }

// torch.ops.specdec.tree_expand: schema and CPU implementation. The Python side repeats failed checks with longer messages
// (kernels/specdec_kernels/tree_expand/reference.py).
#include <tuple>

#include "bindings/laws.h"
#include "verify/expand.h"

namespace specdec::bindings {
namespace {

std::tuple<Tensor, Tensor, Tensor> tree_expand_cpu(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets,
                                                   Tensor scores, int64_t width, int64_t keep, double sharpness,
                                                   Maybe seeds, Maybe positions) {
  const Laws laws = laws_of(logits, inv_t, inv_t, cut, tie_id);
  const int64_t nodes = laws.logits.rows;
  int64_t rows = 0;
  const int32_t* starts = offsets_of(offsets, nodes, &rows);
  SPECDEC_CHECK(width >= 1 && width <= laws.logits.columns && keep >= 1 && sharpness > 0, "tree_expand: width is ", width, ", keep is ", keep);
  SPECDEC_CHECK(seeds.has_value() == positions.has_value(), "tree_expand: seeds go with positions");
  const int64_t* keys = seeds.has_value() ? vector<int64_t>(*seeds, nodes, "seeds") : nullptr;
  const int32_t* places = positions.has_value() ? vector<int32_t>(*positions, nodes, "positions") : nullptr;
  const ScalarType type = laws.wide() ? ScalarType::Double : ScalarType::Float;
  const void* parents = statistic(scores, laws.logits, "scores");
  Tensor tokens = empty({nodes, width}, ScalarType::Long), found = empty({nodes, width}, type);
  Tensor best = empty({rows, keep}, ScalarType::Int);
  if (laws.wide())
    tree_expand<double>(laws, starts, rows, static_cast<const double*>(parents), keys, places,
                        {data<int64_t>(tokens), data<double>(found), data<int32_t>(best), width, keep, sharpness});
  else
    tree_expand<float>(laws, starts, rows, static_cast<const float*>(parents), keys, places,
                       {data<int64_t>(tokens), data<float>(found), data<int32_t>(best), width, keep, static_cast<float>(sharpness)});
  return {tokens, found, best};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "tree_expand(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets, Tensor scores, int width, "
      "int keep, float sharpness, Tensor? seeds, Tensor? positions) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_expand", TORCH_BOX(&specdec::bindings::tree_expand_cpu));
}

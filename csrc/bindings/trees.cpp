// torch.ops.specdec.{tree_plan, tree_expand, tree_grow}: schemas and CPU implementations. The Python references repeat
// failed checks with longer messages (kernels/specdec_kernels/ops/tree_plan/reference.py and its siblings).
#include "trees/tree.h"

#include <cmath>
#include <tuple>
#include <vector>

#include "bindings/distributions.h"
#include "trees/expand.h"

namespace specdec::bindings {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_plan_cpu(Tensor parents, Tensor offsets) {
  SPECDEC_CHECK(parents.dim() == 1, "parents has shape ", shape_of(parents), ", expected [M]");
  const int64_t nodes = parents.size(0);
  int64_t rows = 0;
  const int32_t* starts = offsets_of(offsets, nodes, &rows);
  const int64_t words = std::max<int64_t>(1, (widest_row(starts, rows) + 31) / 32);
  Tensor depth = empty({nodes}, ScalarType::Int), row = empty({nodes}, ScalarType::Int);
  Tensor ancestors = empty({nodes, words}, ScalarType::Int);
  Tensor first = empty({nodes}, ScalarType::Int), next = empty({nodes}, ScalarType::Int);
  const TreeLinks links{data<int32_t>(depth), data<int32_t>(row),  data<int32_t>(ancestors),
                        data<int32_t>(first), data<int32_t>(next), words};
  const int64_t bad = tree_plan(input<int32_t>(parents, "parents"), nodes, starts, rows, links);
  SPECDEC_CHECK(bad < 0, "tree_plan: the parent of packed node ", bad, " is not an earlier node of its row");
  return {depth, row, ancestors, first, next};
}

std::tuple<Tensor, Tensor, Tensor> tree_expand_cpu(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets,
                                                   Tensor scores, int64_t width, int64_t keep, double sharpness,
                                                   Maybe seeds, Maybe positions) {
  const TokenDistributions dists = dists_of(logits, inv_t, inv_t, cut, tie_id);
  const int64_t nodes = dists.logits.rows;
  int64_t rows = 0;
  const int32_t* starts = offsets_of(offsets, nodes, &rows);
  SPECDEC_CHECK(width >= 1 && width <= dists.logits.columns && keep >= 1 && sharpness > 0 && std::isfinite(sharpness), "tree_expand: width is ", width, ", keep is ", keep);
  SPECDEC_CHECK(seeds.has_value() == positions.has_value(), "tree_expand: seeds go with positions");
  const int64_t* keys = seeds.has_value() ? vector<int64_t>(*seeds, nodes, "seeds") : nullptr;
  const int32_t* places = positions.has_value() ? vector<int32_t>(*positions, nodes, "positions") : nullptr;
  const ScalarType type = dists.wide() ? ScalarType::Double : ScalarType::Float;
  const void* parents = statistic(scores, dists.logits, "scores");
  Tensor tokens = empty({nodes, width}, ScalarType::Long), found = empty({nodes, width}, type);
  Tensor best = empty({rows, keep}, ScalarType::Int);
  if (dists.wide())
    tree_expand<double>(dists, starts, rows, static_cast<const double*>(parents), keys, places,
                        {data<int64_t>(tokens), data<double>(found), data<int32_t>(best), width, keep, sharpness});
  else
    tree_expand<float>(dists, starts, rows, static_cast<const float*>(parents), keys, places,
                       {data<int64_t>(tokens), data<float>(found), data<int32_t>(best), width, keep, static_cast<float>(sharpness)});
  return {tokens, found, best};
}

// A table [rows, columns] of tree_grow, changed in place.
template <class T>
T* table(const Tensor& tensor, int64_t rows, int64_t columns, const char* what) {
  SPECDEC_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, "tree_grow: ", what, " has shape ",
                shape_of(tensor), "; expected [", rows, ", ", columns, "], as Growth.room makes it");
  return output<T>(tensor, what);
}

using Grown = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Real>
Grown grow(const TokenDistributions& dists, const int32_t* starts, int64_t rows, const Growth<Real>& growth, const int64_t* seeds,
           const int32_t* positions, int64_t width, Real sharpness) {
  const int64_t nodes = dists.logits.rows, most = growth.level == 0 ? 1 : growth.reach;
  if (growth.level == 0) tree_begin(growth, rows);
  std::vector<Real> parents(nodes, -std::numeric_limits<Real>::infinity()), found(nodes * width);
  std::vector<int64_t> keys(nodes), tokens(nodes * width);
  std::vector<int32_t> places(nodes), best(rows * growth.keep);
  for (int64_t b = 0; b < rows; ++b) {
    SPECDEC_CHECK(starts[b + 1] - starts[b] <= most, "tree_grow: more than ", most, " nodes to grow from in a tree");
    SPECDEC_CHECK(growth.limits[b] <= growth.keep, "tree_grow: a limit is above keep = ", growth.keep);
    for (int64_t i = starts[b]; i < starts[b + 1]; ++i) {
      parents[i] = growth.scores[b * growth.columns + growth.ahead() + i - starts[b]];
      if (seeds == nullptr) continue;
      keys[i] = seeds[b];
      places[i] = positions[b] < 0 ? -1 : positions[b] + static_cast<int32_t>(growth.level) + 1;
    }
  }
  const Children<Real> children{tokens.data(), found.data(), best.data(), width, growth.keep, sharpness};
  tree_expand<Real>(dists, starts, rows, parents.data(), seeds ? keys.data() : nullptr, seeds ? places.data() : nullptr, children);
  const int64_t most_nodes = 1 + (growth.last ? growth.keep : (growth.level + 1) * growth.reach), capacity = rows * most_nodes;
  Tensor packed = empty({capacity}, ScalarType::Long), above = empty({capacity}, ScalarType::Int);
  Tensor counts = empty({2, rows}, ScalarType::Int);
  const PackedTrees out{data<int64_t>(packed), data<int32_t>(above), data<int32_t>(counts), capacity};
  const int64_t bad = tree_enter(growth, children, starts, rows, out);
  SPECDEC_CHECK(bad < 0, "tree_grow: tree ", bad / growth.columns, " of the table does not hold what levels of width ", growth.reach,
                " write (column ", bad % growth.columns, "); give levels in order, from 0 on, with one width");
  const int64_t words = (most_nodes + 31) / 32;
  Tensor depth = empty({capacity}, ScalarType::Int), row = empty({capacity}, ScalarType::Int);
  Tensor ancestors = empty({capacity, words}, ScalarType::Int);
  Tensor first = empty({capacity}, ScalarType::Int), next = empty({capacity}, ScalarType::Int);
  std::vector<int32_t> bounds(rows + 1);
  for (int64_t b = 0; b < rows; ++b) bounds[b + 1] = bounds[b] + out.counts[b];
  tree_plan(out.parents, capacity, bounds.data(), rows,
            {data<int32_t>(depth), data<int32_t>(row), data<int32_t>(ancestors), data<int32_t>(first), data<int32_t>(next), words});
  return {packed, above, counts, depth, row, ancestors, first, next};
}

Grown tree_grow_cpu(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets, Tensor tokens, Tensor scores,
                    Tensor parents, Tensor nodes, Tensor limits, int64_t level, int64_t width, int64_t keep, bool last,
                    double sharpness, Maybe seeds, Maybe positions) {
  const TokenDistributions dists = dists_of(logits, inv_t, inv_t, cut, tie_id);
  int64_t rows = 0;
  const int32_t* starts = offsets_of(offsets, dists.logits.rows, &rows);
  SPECDEC_CHECK(starts[rows] == dists.logits.rows, "tree_grow: logits of nodes without a tree");
  SPECDEC_CHECK(width >= 1 && keep >= 1 && sharpness > 0 && std::isfinite(sharpness), "tree_grow: width is ", width, ", keep is ", keep);
  SPECDEC_CHECK(tokens.dim() == 2, "tree_grow: tokens has shape ", shape_of(tokens), "; expected [B, C]");
  const int64_t columns = tokens.size(1);
  SPECDEC_CHECK(level >= 0 && (level + 1) * keep < columns, "tree_grow: level is ", level, ", the table has ", columns, " columns");
  SPECDEC_CHECK(seeds.has_value() == positions.has_value(), "tree_grow: seeds go with positions");
  const int64_t* keys = seeds.has_value() ? vector<int64_t>(*seeds, rows, "seeds") : nullptr;
  const int32_t* places = positions.has_value() ? vector<int32_t>(*positions, rows, "positions") : nullptr;
  const auto run = [&](auto real) {
    using Real = decltype(real);
    const Growth<Real> growth{table<int64_t>(tokens, rows, columns, "tokens"), table<Real>(scores, rows, columns, "scores"),
                              table<int32_t>(parents, rows, columns, "parents"), table<int32_t>(nodes, rows, columns, "nodes"),
                              vector<int32_t>(limits, rows, "limits"), columns, keep, level, std::min(width, keep), last};
    return grow<Real>(dists, starts, rows, growth, keys, places, std::min(width, dists.logits.columns), static_cast<Real>(sharpness));
  };
  return dists.wide() ? run(double{}) : run(float{});
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("tree_plan(Tensor parents, Tensor offsets) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "tree_expand(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets, Tensor scores, int width, "
      "int keep, float sharpness, Tensor? seeds, Tensor? positions) -> (Tensor, Tensor, Tensor)");
  m.def(
      "tree_grow(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor offsets, Tensor(a!) tokens, "
      "Tensor(b!) scores, Tensor(c!) parents, Tensor(d!) nodes, Tensor limits, int level, int width, int keep, "
      "bool last, float sharpness, Tensor? seeds, Tensor? positions) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_plan", TORCH_BOX(&specdec::bindings::tree_plan_cpu));
  m.impl("tree_expand", TORCH_BOX(&specdec::bindings::tree_expand_cpu));
  m.impl("tree_grow", TORCH_BOX(&specdec::bindings::tree_grow_cpu));
}

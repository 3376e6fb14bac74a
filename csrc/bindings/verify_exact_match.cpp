// torch.ops.specdec.{exact_match_verify, replay_verify}: schemas and CPU implementations. The Python references repeat
// failed checks with longer messages.
#include <tuple>

#include "bindings/distributions.h"
#include "bindings/statistics.h"
#include "sampling/sample.h"
#include "trees/tree.h"

namespace specdec::bindings {
namespace {

// The checked trees of both operators.
WalkedTree walked_tree(const Tensor& tokens, const Tensor& offsets, const Tensor& first_child, const Tensor& next_sibling,
                       const Maybe& score_only, int64_t* rows) {
  SPECDEC_CHECK(tokens.dim() == 1, "tokens has shape ", shape_of(tokens), ", expected [M]");
  const int64_t nodes = tokens.size(0);
  return {vector<int64_t>(tokens, nodes, "tokens"), nodes, offsets_of(offsets, nodes, rows),
          vector<int32_t>(first_child, nodes, "first_child"), vector<int32_t>(next_sibling, nodes, "next_sibling"),
          score_only.has_value() ? vector<bool>(*score_only, nodes, "score_only") : nullptr};
}

void check_walk(const char* op, Walk walk, int64_t row, int64_t max_depth) {
  SPECDEC_CHECK(walk != Walk::kBadLink, op, ": links of row ", row, " do not point forward");
  SPECDEC_CHECK(walk != Walk::kTooDeep, op, ": the path of row ", row, " is longer than max_depth = ", max_depth,
                "; expected a capacity of at least the largest depth; pass a larger max_depth");
}

std::tuple<Tensor, Tensor, Tensor> exact_match_verify_cpu(
    Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor node_choice, Maybe score_only,
    int64_t max_depth) {
  SPECDEC_CHECK(max_depth >= 0, "max_depth is ", max_depth);
  int64_t rows = 0, row = 0;
  const WalkedTree tree = walked_tree(tokens, offsets, first_child, next_sibling, score_only, &rows);
  const PathTensors out(rows, max_depth);
  const int64_t* choice = vector<int64_t>(node_choice, tree.nodes, "node_choice");
  const Walk walk = exact_match_verify(tree, rows, choice, out.view(max_depth), &row);
  check_walk("exact_match_verify", walk, row, max_depth);
  return {out.path, out.num_accepted, out.next_token};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> replay_verify_cpu(
    Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Maybe score_only, Tensor logits,
    Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor root_positions, int64_t max_depth) {
  SPECDEC_CHECK(max_depth >= 0, "max_depth is ", max_depth);
  int64_t rows = 0, row = 0;
  const WalkedTree tree = walked_tree(tokens, offsets, first_child, next_sibling, score_only, &rows);
  const StatsTensors stats(matrix(logits, "logits"), true);
  const LazyStats lazy = lazy_stats(logits, temperature, top_k, top_p, min_p, stats);
  SPECDEC_CHECK(lazy.logits.rows == tree.nodes, "logits has ", lazy.logits.rows, " rows for ", tree.nodes, " nodes");
  mark_uncomputed(lazy, 0, lazy.logits.rows);
  TokenDistributions dists = dists_of(logits, stats.inv_t, stats.lse, stats.cut, stats.tie_id);
  dists.lazy = &lazy;
  const PathTensors out(rows, max_depth);
  const Walk walk = replay_verify(tree, rows, dists, vector<int64_t>(seeds, rows, "seeds"),
                                  vector<int32_t>(root_positions, rows, "root_positions"), out.view(max_depth), &row);
  check_walk("replay_verify", walk, row, max_depth);
  return {out.path, out.num_accepted, out.next_token, stats.inv_t, stats.lse, stats.cut, stats.tie_id, *stats.mass};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "exact_match_verify(Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor node_choice, "
      "Tensor? score_only, int max_depth) -> (Tensor, Tensor, Tensor)");
  m.def(
      "replay_verify(Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor? score_only, "
      "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor root_positions, int max_depth) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("exact_match_verify", TORCH_BOX(&specdec::bindings::exact_match_verify_cpu));
  m.impl("replay_verify", TORCH_BOX(&specdec::bindings::replay_verify_cpu));
}

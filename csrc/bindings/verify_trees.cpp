// torch.ops.specdec.{recursive_rejection, traversal}_{verify, thresholds} and typical_verify, on packed trees: schemas and
// CPU implementations. The Python references repeat failed checks with longer messages
// (kernels/specdec_kernels/ops/_proposals/checks.py).
#include <tuple>
#include <vector>

#include "bindings/distributions.h"
#include "bindings/step_noise.h"
#include "verify/recursive_rejection.h"
#include "verify/traversal.h"
#include "verify/typical.h"

namespace specdec::bindings {
namespace {

// The checked trees of all operators and their distributions.
struct TreeArguments {
  TreeDraft draft;
  TokenDistributions target, drafts;
  std::vector<int8_t> all_deterministic;
  std::vector<int32_t> no_row;

  // Without proposal_kinds and dist_index every node is deterministic.
  TreeArguments(const Tensor& tokens, const Tensor& offsets, const Tensor& first_child, const Tensor& next_sibling,
                const Maybe& proposal_kinds, const Maybe& dist_index, const TokenDistributions& target_, const Maybe& logits,
                const Maybe& inv_t, const Maybe& lse, const Maybe& cut, const Maybe& tie_id, const Maybe& token_ids,
                const Maybe& score_only)
      : target(target_) {
    SPECDEC_CHECK(tokens.dim() == 1, "tokens has shape ", shape_of(tokens), ", expected [M]");
    draft.nodes = tokens.size(0);
    draft.offsets = offsets_of(offsets, draft.nodes, &draft.rows);
    draft.tokens = input<int64_t>(tokens, "tokens");
    draft.first_child = vector<int32_t>(first_child, draft.nodes, "first_child");
    draft.next_sibling = vector<int32_t>(next_sibling, draft.nodes, "next_sibling");
    if (!proposal_kinds.has_value()) {
      all_deterministic.assign(draft.nodes, kDeterministic);
      no_row.assign(draft.nodes, -1);
    }
    draft.proposal_kinds = proposal_kinds.has_value() ? vector<int8_t>(*proposal_kinds, draft.nodes, "proposal_kinds") : all_deterministic.data();
    draft.dist_index = proposal_kinds.has_value() ? vector<int32_t>(dist_index.value(), draft.nodes, "dist_index") : no_row.data();
    draft.score_only = score_only.has_value() ? vector<bool>(*score_only, draft.nodes, "score_only") : nullptr;
    bind_dists(target, logits, inv_t, lse, cut, tie_id, token_ids, &drafts, &draft);
    int64_t at = 0;
    const char* invalid = invalid_tree(draft, target, &at);
    SPECDEC_CHECK(invalid == nullptr, invalid, "[", at, "] is out of range");
  }
  TreeArguments(const TreeArguments&) = delete;
};

using Verify = void (*)(const TreeDraft&, const TokenDistributions&, const StepNoise&, const Path&);
using Thresholds = void (*)(const TreeDraft&, const TokenDistributions&, void*, void*);

template <Verify Function>
std::tuple<Tensor, Tensor, Tensor> verify_cpu(
    Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor proposal_kinds, Tensor dist_index, Tensor logits,
    Tensor inv_t, Tensor lse, Tensor cut, Tensor tie_id, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse,
    Maybe draft_cut, Maybe draft_tie_id, Maybe token_ids, Maybe score_only, Tensor seeds, Tensor root_positions,
    Maybe uniforms, Maybe block_noise, Maybe token_noise, int64_t max_depth) {
  const TreeArguments a(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index,
                        dists_of(logits, inv_t, lse, cut, tie_id), draft_logits, draft_inv_t, draft_lse, draft_cut,
                        draft_tie_id, token_ids, score_only);
  const int64_t rows = a.draft.rows;
  SPECDEC_CHECK(max_depth >= 0 && deepest(a.draft) <= max_depth, "max_depth is ", max_depth);
  const StepNoise noise =
      step_noise(a.draft.nodes, rows, a.target.logits.columns, seeds, root_positions, uniforms, block_noise, token_noise);
  const PathTensors out(rows, max_depth);
  Function(a.draft, a.target, noise, out.view(max_depth));
  return {out.path, out.num_accepted, out.next_token};
}

template <Thresholds Function>
std::tuple<Tensor, Tensor> thresholds_cpu(
    Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor proposal_kinds, Tensor dist_index, Tensor logits,
    Tensor inv_t, Tensor lse, Tensor cut, Tensor tie_id, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse,
    Maybe draft_cut, Maybe draft_tie_id, Maybe token_ids, Maybe score_only) {
  const TreeArguments a(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index,
                        dists_of(logits, inv_t, lse, cut, tie_id), draft_logits, draft_inv_t, draft_lse, draft_cut,
                        draft_tie_id, token_ids, score_only);
  const bool wide = a.target.wide() || (a.draft.dists != nullptr && a.drafts.wide());
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor accept = empty({a.draft.nodes}, type);
  Tensor residual = empty({a.draft.nodes, a.target.logits.columns}, type);
  Function(a.draft, a.target, accept.mutable_data_ptr(), residual.mutable_data_ptr());
  return {accept, residual};
}

std::tuple<Tensor, Tensor, Tensor> typical_verify_cpu(
    Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor logits, Tensor inv_t, Tensor lse,
    Tensor cut, Tensor tie_id, Maybe score_only, Tensor seeds, Tensor root_positions, double epsilon, double delta,
    int64_t max_depth) {
  const Maybe none;
  const TreeArguments a(tokens, offsets, first_child, next_sibling, none, none,
                        dists_of(logits, inv_t, lse, cut, tie_id), none, none, none, none, none, none, score_only);
  const int64_t rows = a.draft.rows;
  SPECDEC_CHECK(max_depth >= 0 && deepest(a.draft) <= max_depth, "max_depth is ", max_depth);
  SPECDEC_CHECK(epsilon >= 0 && delta >= 0, "epsilon is ", epsilon, ", delta is ", delta);
  const StepNoise noise = step_noise(a.draft.nodes, rows, a.target.logits.columns, seeds, root_positions, none, none, none);
  const PathTensors out(rows, max_depth);
  typical_verify(a.draft, a.target, {epsilon, delta}, noise, out.view(max_depth));
  return {out.path, out.num_accepted, out.next_token};
}

#define SPECDEC_TREE_DRAFT                                                                                           \
  "Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor proposal_kinds, Tensor dist_index, "  \
  "Tensor logits, Tensor inv_t, Tensor lse, Tensor cut, Tensor tie_id, Tensor? draft_logits, Tensor? draft_inv_t, "  \
  "Tensor? draft_lse, Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, Tensor? score_only"
#define SPECDEC_STEP_NOISE                                                                                 \
  "Tensor seeds, Tensor root_positions, Tensor? uniforms, Tensor? block_noise, Tensor? token_noise, " \
  "int max_depth"

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("recursive_rejection_verify(" SPECDEC_TREE_DRAFT ", " SPECDEC_STEP_NOISE ") -> (Tensor, Tensor, Tensor)");
  m.def("recursive_rejection_thresholds(" SPECDEC_TREE_DRAFT ") -> (Tensor, Tensor)");
  m.def("traversal_verify(" SPECDEC_TREE_DRAFT ", " SPECDEC_STEP_NOISE ") -> (Tensor, Tensor, Tensor)");
  m.def("traversal_thresholds(" SPECDEC_TREE_DRAFT ") -> (Tensor, Tensor)");
  m.def(
      "typical_verify(Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor logits, Tensor inv_t, "
      "Tensor lse, Tensor cut, Tensor tie_id, Tensor? score_only, Tensor seeds, Tensor root_positions, float epsilon, "
      "float delta, int max_depth) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  using namespace specdec::bindings;
  m.impl("recursive_rejection_verify", TORCH_BOX(&verify_cpu<specdec::recursive_rejection_verify>));
  m.impl("recursive_rejection_thresholds", TORCH_BOX(&thresholds_cpu<specdec::recursive_rejection_thresholds>));
  m.impl("traversal_verify", TORCH_BOX(&verify_cpu<specdec::traversal_verify>));
  m.impl("traversal_thresholds", TORCH_BOX(&thresholds_cpu<specdec::traversal_thresholds>));
  m.impl("typical_verify", TORCH_BOX(&typical_verify_cpu));
}

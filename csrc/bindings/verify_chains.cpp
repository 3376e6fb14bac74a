// torch.ops.specdec.{rejection_verify, rejection_verify_logits, rejection_thresholds}, on packed chains: schemas and CPU
// implementations. The Python references repeat failed checks with longer messages.
#include <tuple>

#include "bindings/distributions.h"
#include "bindings/statistics.h"
#include "bindings/step_noise.h"
#include "verify/rejection.h"

namespace specdec::bindings {
namespace {

// The checked chains of the three operators and their distributions.
struct ChainArguments {
  ChainDraft draft;
  TokenDistributions target, drafts;

  ChainArguments(const Tensor& tokens, const Tensor& offsets, const Tensor& proposal_kinds, const Tensor& dist_index,
                 const TokenDistributions& target_, const Maybe& logits, const Maybe& inv_t, const Maybe& lse, const Maybe& cut,
                 const Maybe& tie_id, const Maybe& token_ids, const Maybe& mass = std::nullopt)
      : target(target_) {
    add_masses(&target, mass);
    SPECDEC_CHECK(tokens.dim() == 1, "tokens has shape ", shape_of(tokens), ", expected [M]");
    draft.nodes = tokens.size(0);
    draft.offsets = offsets_of(offsets, draft.nodes, &draft.rows);
    draft.tokens = input<int64_t>(tokens, "tokens");
    draft.proposal_kinds = vector<int8_t>(proposal_kinds, draft.nodes, "proposal_kinds");
    draft.dist_index = vector<int32_t>(dist_index, draft.nodes, "dist_index");
    bind_dists(target, logits, inv_t, lse, cut, tie_id, token_ids, &drafts, &draft);
    int64_t at = 0;
    const char* invalid = invalid_chain(draft, target, &at);
    SPECDEC_CHECK(invalid == nullptr, invalid, "[", at, "] is out of range");
  }
  ChainArguments(const ChainArguments&) = delete;
};

// The noise of one step, after the check of max_depth.
StepNoise noise_of(const ChainArguments& a, const Tensor& seeds, const Tensor& root_positions, const Maybe& uniforms,
                   const Maybe& block_noise, const Maybe& token_noise, int64_t max_depth) {
  SPECDEC_CHECK(max_depth >= 0 && widest_row(a.draft.offsets, a.draft.rows) <= max_depth + 1, "max_depth is ", max_depth);
  return step_noise(a.draft.nodes, a.draft.rows, a.target.logits.columns, seeds, root_positions, uniforms, block_noise, token_noise);
}

std::tuple<Tensor, Tensor, Tensor> rejection_verify_cpu(
    Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor inv_t, Tensor lse, Tensor cut,
    Tensor tie_id, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse, Maybe draft_cut, Maybe draft_tie_id,
    Maybe token_ids, Tensor seeds, Tensor root_positions, Maybe uniforms, Maybe block_noise, Maybe token_noise,
    int64_t max_depth, bool block, Maybe mass) {
  const ChainArguments a(tokens, offsets, proposal_kinds, dist_index, dists_of(logits, inv_t, lse, cut, tie_id), draft_logits,
                         draft_inv_t, draft_lse, draft_cut, draft_tie_id, token_ids, mass);
  const StepNoise noise = noise_of(a, seeds, root_positions, uniforms, block_noise, token_noise, max_depth);
  const PathTensors out(a.draft.rows, max_depth);
  rejection_verify(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kRejection, noise, out.view(max_depth));
  return {out.path, out.num_accepted, out.next_token};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> rejection_verify_logits_cpu(
    Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor temperature, Tensor top_k,
    Tensor top_p, Tensor min_p, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse, Maybe draft_cut,
    Maybe draft_tie_id, Maybe token_ids, Tensor seeds, Tensor root_positions, int64_t max_depth, bool block) {
  const StatsTensors stats(matrix(logits, "logits"), true);
  const LazyStats lazy = lazy_stats(logits, temperature, top_k, top_p, min_p, stats);
  mark_uncomputed(lazy, 0, lazy.logits.rows);
  TokenDistributions target = dists_of(logits, stats.inv_t, stats.lse, stats.cut, stats.tie_id);
  target.lazy = &lazy;
  const ChainArguments a(tokens, offsets, proposal_kinds, dist_index, target, draft_logits, draft_inv_t, draft_lse, draft_cut,
                         draft_tie_id, token_ids, stats.mass);
  const StepNoise noise = noise_of(a, seeds, root_positions, std::nullopt, std::nullopt, std::nullopt, max_depth);
  const PathTensors out(a.draft.rows, max_depth);
  rejection_verify(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kRejection, noise, out.view(max_depth));
  return {out.path, out.num_accepted, out.next_token, stats.inv_t, stats.lse, stats.cut, stats.tie_id, *stats.mass};
}

std::tuple<Tensor, Tensor> rejection_thresholds_cpu(
    Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor inv_t, Tensor lse, Tensor cut,
    Tensor tie_id, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse, Maybe draft_cut, Maybe draft_tie_id,
    Maybe token_ids, bool block) {
  const ChainArguments a(tokens, offsets, proposal_kinds, dist_index, dists_of(logits, inv_t, lse, cut, tie_id), draft_logits,
                         draft_inv_t, draft_lse, draft_cut, draft_tie_id, token_ids);
  const bool wide = a.target.wide() || (a.draft.dists != nullptr && a.drafts.wide());
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor accept = empty({a.draft.nodes}, type);
  Tensor residual = empty({a.draft.nodes, a.target.logits.columns}, type);
  rejection_thresholds(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kRejection, accept.mutable_data_ptr(), residual.mutable_data_ptr());
  return {accept, residual};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "rejection_verify(Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor inv_t, "
      "Tensor lse, Tensor cut, Tensor tie_id, Tensor? draft_logits, Tensor? draft_inv_t, Tensor? draft_lse, "
      "Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, Tensor seeds, Tensor root_positions, "
      "Tensor? uniforms, Tensor? block_noise, Tensor? token_noise, int max_depth, bool block, Tensor? mass) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "rejection_verify_logits(Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, "
      "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? draft_logits, Tensor? draft_inv_t, "
      "Tensor? draft_lse, Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, Tensor seeds, "
      "Tensor root_positions, int max_depth, bool block) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rejection_thresholds(Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor inv_t, "
      "Tensor lse, Tensor cut, Tensor tie_id, Tensor? draft_logits, Tensor? draft_inv_t, Tensor? draft_lse, "
      "Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, bool block) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("rejection_verify", TORCH_BOX(&specdec::bindings::rejection_verify_cpu));
  m.impl("rejection_verify_logits", TORCH_BOX(&specdec::bindings::rejection_verify_logits_cpu));
  m.impl("rejection_thresholds", TORCH_BOX(&specdec::bindings::rejection_thresholds_cpu));
}

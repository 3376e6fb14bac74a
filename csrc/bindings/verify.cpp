// torch.ops.specdec.{distribution_stats, dist_masses, replay_sample, draft_sample, tree_plan, exact_match_verify,
// replay_verify, rejection_verify, rejection_verify_logits, rejection_thresholds}: schemas and CPU implementations.
// The Python side repeats failed checks with longer messages (kernels/.../reference.py).
#include <tuple>
#include <vector>

#include "bindings/distributions.h"
#include "random.h"
#include "verify/rejection.h"
#include "distribution/distribution_stats.h"
#include "sampling/sample.h"
#include "trees/tree.h"

namespace specdec::bindings {
namespace {

// Results of distribution_stats.
struct StatsTensors {
  Tensor inv_t, lse, cut, tie_id;
  Maybe mass;

  StatsTensors(const Matrix& m, bool masses) : StatsTensors(m, masses, m.type == Scalar::Float64 ? ScalarType::Double : ScalarType::Float) {}

 private:
  StatsTensors(const Matrix& m, bool masses, ScalarType type)
      : inv_t(empty({m.rows}, type)),
        lse(empty({m.rows}, type)),
        cut(empty({m.rows}, type)),
        tie_id(empty({m.rows}, ScalarType::Int)) {
    if (masses) mass = empty({m.rows, block_count(m.columns)}, type);
  }
};

// Logits with the sampling parameters of their rows, checked, and where their statistics go.
AskedRows asked_rows(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                     const Tensor& min_p, const StatsTensors& out) {
  const Matrix m = matrix(logits, "logits");
  const SamplingRows sampling{vector<float>(temperature, m.rows, "temperature"), vector<int32_t>(top_k, m.rows, "top_k"),
                              vector<float>(top_p, m.rows, "top_p"), vector<float>(min_p, m.rows, "min_p")};
  int64_t row = 0;
  const char* bad = invalid_parameter(sampling, m.rows, &row);
  SPECDEC_CHECK(bad == nullptr, "distribution_stats: ", bad, "[", row, "] is out of range");
  return {m, sampling, out.inv_t.mutable_data_ptr(), out.lse.mutable_data_ptr(), out.cut.mutable_data_ptr(),
          data<int32_t>(out.tie_id), out.mass.has_value() ? out.mass->mutable_data_ptr() : nullptr};
}

StatsTensors stats_of(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                      const Tensor& min_p, bool masses) {
  StatsTensors out(matrix(logits, "logits"), masses);
  const AskedRows to = asked_rows(logits, temperature, top_k, top_p, min_p, out);
  distribution_stats(to.logits, to.sampling, to.inv_t, to.lse, to.cut, to.tie_id, to.mass);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> distribution_stats_cpu(
    Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) {
  const StatsTensors out = stats_of(logits, temperature, top_k, top_p, min_p, false);
  return {out.inv_t, out.lse, out.cut, out.tie_id};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dist_masses_cpu(
    Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) {
  const StatsTensors out = stats_of(logits, temperature, top_k, top_p, min_p, true);
  return {out.inv_t, out.lse, out.cut, out.tie_id, *out.mass};
}

Tensor replay_sample_cpu(
    Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor seeds, Tensor positions, Maybe noise) {
  const TokenDistributions dists = dists_of(logits, inv_t, inv_t, cut, tie_id);
  const int64_t rows = dists.logits.rows;
  const float* explicit_noise = nullptr;
  if (noise.has_value()) {
    SPECDEC_CHECK(noise->dim() == 2 && noise->size(0) == rows && noise->size(1) == dists.logits.columns,
                  "noise has shape ", shape_of(*noise));
    explicit_noise = input<float>(*noise, "noise");
  }
  Tensor tokens = empty({rows}, ScalarType::Long);
  replay_sample(dists, vector<int64_t>(seeds, rows, "seeds"), vector<int32_t>(positions, rows, "positions"),
                explicit_noise, data<int64_t>(tokens));
  return tokens;
}

Tensor draft_sample_cpu(
    Tensor logits, Tensor inv_t, Tensor lse, Tensor cut, Tensor tie_id, Tensor seeds, Tensor root_positions,
    Tensor index, Maybe mass) {
  TokenDistributions dists = dists_of(logits, inv_t, lse, cut, tie_id);
  add_masses(&dists, mass);
  const int64_t rows = dists.logits.rows;
  Tensor tokens = empty({rows}, ScalarType::Long);
  draft_sample(dists, vector<int64_t>(seeds, rows, "seeds"), vector<int32_t>(root_positions, rows, "root_positions"),
              vector<int32_t>(index, rows, "index"), data<int64_t>(tokens));
  return tokens;
}

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

// Trees as the walks take them, checked.
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
  const AskedRows asked = asked_rows(logits, temperature, top_k, top_p, min_p, stats);
  SPECDEC_CHECK(asked.logits.rows == tree.nodes, "logits has ", asked.logits.rows, " rows for ", tree.nodes, " nodes");
  forget(asked, 0, asked.logits.rows);
  TokenDistributions dists = dists_of(logits, stats.inv_t, stats.lse, stats.cut, stats.tie_id);
  dists.asked = &asked;
  const PathTensors out(rows, max_depth);
  const Walk walk = replay_verify(tree, rows, dists, vector<int64_t>(seeds, rows, "seeds"),
                                  vector<int32_t>(root_positions, rows, "root_positions"), out.view(max_depth), &row);
  check_walk("replay_verify", walk, row, max_depth);
  return {out.path, out.num_accepted, out.next_token, stats.inv_t, stats.lse, stats.cut, stats.tie_id, *stats.mass};
}

// The draft of rejection_verify and rejection_thresholds, checked.
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
    draft.proposal_kinds = vector<int8_t>(proposal_kinds, draft.nodes, "drawn");
    draft.dist_index = vector<int32_t>(dist_index, draft.nodes, "dist_index");
    SPECDEC_CHECK(target.logits.rows == draft.nodes, "target has ", target.logits.rows, " distributions for ", draft.nodes, " nodes");
    draft.dists = nullptr;
    draft.token_ids = nullptr;
    if (logits.has_value()) {
      drafts = dists_of(*logits, inv_t.value(), lse.value(), cut.value(), tie_id.value());
      draft.dists = &drafts;
      if (token_ids.has_value())
        draft.token_ids = vector<int64_t>(*token_ids, drafts.logits.columns, "token_ids");
      else
        SPECDEC_CHECK(drafts.logits.columns <= target.logits.columns, "draft distributions are wider than target distributions");
    }
    int64_t at = 0;
    const char* bad = invalid_chain(draft, target, &at);
    SPECDEC_CHECK(bad == nullptr, bad, "[", at, "] is out of range");
  }
  ChainArguments(const ChainArguments&) = delete;
};

// Explicit noise of rejection_verify, checked, beside the keyed one.
ChainNoise chain_noise(const ChainArguments& a, const Tensor& seeds, const Tensor& root_positions, const Maybe& uniforms,
                       const Maybe& block_noise, const Maybe& token_noise, int64_t max_depth) {
  const int64_t rows = a.draft.rows, vocab = a.target.logits.columns;
  SPECDEC_CHECK(max_depth >= 0 && widest_row(a.draft.offsets, rows) <= max_depth + 1, "max_depth is ", max_depth);
  ChainNoise noise{vector<int64_t>(seeds, rows, "seeds"), vector<int32_t>(root_positions, rows, "root_positions"),
                   nullptr, nullptr, nullptr};
  if (uniforms.has_value()) noise.uniforms = vector<float>(*uniforms, a.draft.nodes, "uniforms");
  if (block_noise.has_value()) {
    SPECDEC_CHECK(block_noise->dim() == 2 && block_noise->size(0) == rows && block_noise->size(1) == block_count(vocab),
                  "block noise has shape ", shape_of(*block_noise));
    SPECDEC_CHECK(token_noise.has_value() && token_noise->dim() == 2 && token_noise->size(0) == rows &&
                      token_noise->size(1) == vocab, "token noise has the wrong shape");
    noise.block_noise = input<float>(*block_noise, "block noise");
    noise.token_noise = input<float>(*token_noise, "token noise");
  }
  return noise;
}

std::tuple<Tensor, Tensor, Tensor> rejection_verify_cpu(
    Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor inv_t, Tensor lse, Tensor cut,
    Tensor tie_id, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse, Maybe draft_cut, Maybe draft_tie_id,
    Maybe token_ids, Tensor seeds, Tensor root_positions, Maybe uniforms, Maybe block_noise, Maybe token_noise,
    int64_t max_depth, bool block, Maybe mass) {
  const ChainArguments a(tokens, offsets, proposal_kinds, dist_index, dists_of(logits, inv_t, lse, cut, tie_id), draft_logits,
                         draft_inv_t, draft_lse, draft_cut, draft_tie_id, token_ids, mass);
  const ChainNoise noise = chain_noise(a, seeds, root_positions, uniforms, block_noise, token_noise, max_depth);
  const PathTensors out(a.draft.rows, max_depth);
  rejection_verify(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kToken, noise, out.view(max_depth));
  return {out.path, out.num_accepted, out.next_token};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> rejection_verify_logits_cpu(
    Tensor tokens, Tensor offsets, Tensor proposal_kinds, Tensor dist_index, Tensor logits, Tensor temperature, Tensor top_k,
    Tensor top_p, Tensor min_p, Maybe draft_logits, Maybe draft_inv_t, Maybe draft_lse, Maybe draft_cut,
    Maybe draft_tie_id, Maybe token_ids, Tensor seeds, Tensor root_positions, int64_t max_depth, bool block) {
  const StatsTensors stats(matrix(logits, "logits"), true);
  const AskedRows rows = asked_rows(logits, temperature, top_k, top_p, min_p, stats);
  forget(rows, 0, rows.logits.rows);
  TokenDistributions target = dists_of(logits, stats.inv_t, stats.lse, stats.cut, stats.tie_id);
  target.asked = &rows;
  const ChainArguments a(tokens, offsets, proposal_kinds, dist_index, target, draft_logits, draft_inv_t, draft_lse, draft_cut,
                         draft_tie_id, token_ids, stats.mass);
  const ChainNoise noise = chain_noise(a, seeds, root_positions, std::nullopt, std::nullopt, std::nullopt, max_depth);
  const PathTensors out(a.draft.rows, max_depth);
  rejection_verify(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kToken, noise, out.view(max_depth));
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
  rejection_thresholds(a.draft, a.target, block ? ChainRule::kBlock : ChainRule::kToken, accept.mutable_data_ptr(), residual.mutable_data_ptr());
  return {accept, residual};
}

// Noise of tokens 0 .. count - 1, for comparisons with the reference. kind 0: word, 1: exponential, 2: Gumbel,
// 3: uniform, 4: Gumbel by the vector code.
Tensor noise_cpu(Tensor like, int64_t seed, int64_t position, int64_t index, int64_t stream, int64_t count, int64_t kind) {
  const Counter counter(seed, static_cast<int32_t>(position), static_cast<int32_t>(index), static_cast<uint32_t>(stream));
  Tensor out = empty({count}, kind == 0 ? ScalarType::Long : ScalarType::Float);
  if (kind == 4) {
    row_kernels().gumbel_row(counter, count, data<float>(out));
    return out;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = random_word(counter, static_cast<uint32_t>(i));
    if (kind == 0)
      data<int64_t>(out)[i] = word;
    else
      data<float>(out)[i] = kind == 1 ? exponential(word) : kind == 2 ? gumbel(word) : uniform(word);
  }
  return out;
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "distribution_stats(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dist_masses(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "replay_sample(Tensor logits, Tensor inv_t, Tensor cut, Tensor tie_id, Tensor seeds, Tensor positions, "
      "Tensor? noise) -> Tensor");
  m.def(
      "draft_sample(Tensor logits, Tensor inv_t, Tensor lse, Tensor cut, Tensor tie_id, Tensor seeds, "
      "Tensor root_positions, Tensor index, Tensor? mass) -> Tensor");
  m.def("tree_plan(Tensor parents, Tensor offsets) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "exact_match_verify(Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor node_choice, "
      "Tensor? score_only, int max_depth) -> (Tensor, Tensor, Tensor)");
  m.def(
      "replay_verify(Tensor tokens, Tensor offsets, Tensor first_child, Tensor next_sibling, Tensor? score_only, "
      "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor root_positions, int max_depth) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rejection_verify(Tensor tokens, Tensor offsets, Tensor drawn, Tensor dist_index, Tensor logits, Tensor inv_t, "
      "Tensor lse, Tensor cut, Tensor tie_id, Tensor? draft_logits, Tensor? draft_inv_t, Tensor? draft_lse, "
      "Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, Tensor seeds, Tensor root_positions, "
      "Tensor? uniforms, Tensor? block_noise, Tensor? token_noise, int max_depth, bool block, Tensor? mass) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "rejection_verify_logits(Tensor tokens, Tensor offsets, Tensor drawn, Tensor dist_index, Tensor logits, "
      "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? draft_logits, Tensor? draft_inv_t, "
      "Tensor? draft_lse, Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, Tensor seeds, "
      "Tensor root_positions, int max_depth, bool block) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rejection_thresholds(Tensor tokens, Tensor offsets, Tensor drawn, Tensor dist_index, Tensor logits, Tensor inv_t, "
      "Tensor lse, Tensor cut, Tensor tie_id, Tensor? draft_logits, Tensor? draft_inv_t, Tensor? draft_lse, "
      "Tensor? draft_cut, Tensor? draft_tie_id, Tensor? token_ids, bool block) -> (Tensor, Tensor)");
  m.def("noise(Tensor like, int seed, int position, int index, int stream, int count, int kind) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("distribution_stats", TORCH_BOX(&specdec::bindings::distribution_stats_cpu));
  m.impl("dist_masses", TORCH_BOX(&specdec::bindings::dist_masses_cpu));
  m.impl("replay_sample", TORCH_BOX(&specdec::bindings::replay_sample_cpu));
  m.impl("draft_sample", TORCH_BOX(&specdec::bindings::draft_sample_cpu));
  m.impl("tree_plan", TORCH_BOX(&specdec::bindings::tree_plan_cpu));
  m.impl("exact_match_verify", TORCH_BOX(&specdec::bindings::exact_match_verify_cpu));
  m.impl("replay_verify", TORCH_BOX(&specdec::bindings::replay_verify_cpu));
  m.impl("rejection_verify", TORCH_BOX(&specdec::bindings::rejection_verify_cpu));
  m.impl("rejection_verify_logits", TORCH_BOX(&specdec::bindings::rejection_verify_logits_cpu));
  m.impl("rejection_thresholds", TORCH_BOX(&specdec::bindings::rejection_thresholds_cpu));
  m.impl("noise", TORCH_BOX(&specdec::bindings::noise_cpu));
}

// torch.ops.specdec.{distribution_stats, dist_masses, replay_sample, draft_sample, noise}: schemas and CPU
// implementations. The Python references repeat failed checks with longer messages.
#include "sampling/sample.h"

#include <tuple>

#include "bindings/distributions.h"
#include "bindings/statistics.h"
#include "random.h"

namespace specdec::bindings {
namespace {

StatsTensors stats_of(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                      const Tensor& min_p, bool masses) {
  StatsTensors out(matrix(logits, "logits"), masses);
  const LazyStats to = lazy_stats(logits, temperature, top_k, top_p, min_p, out);
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

// Noise [count] of tokens 0 .. count - 1, for comparisons with the reference. kind 0: Philox word, 1: exponential,
// 2: Gumbel, 3: uniform, 4: Gumbel by the vector code.
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
  m.def("noise(Tensor like, int seed, int position, int index, int stream, int count, int kind) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("distribution_stats", TORCH_BOX(&specdec::bindings::distribution_stats_cpu));
  m.impl("dist_masses", TORCH_BOX(&specdec::bindings::dist_masses_cpu));
  m.impl("replay_sample", TORCH_BOX(&specdec::bindings::replay_sample_cpu));
  m.impl("draft_sample", TORCH_BOX(&specdec::bindings::draft_sample_cpu));
  m.impl("noise", TORCH_BOX(&specdec::bindings::noise_cpu));
}

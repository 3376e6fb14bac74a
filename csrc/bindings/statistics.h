// Sampling parameters as arguments, and the statistics of distribution_stats as results. For operators on logits [R, V].
#pragma once
#include "bindings/distributions.h"
#include "distribution/distribution_stats.h"

namespace specdec::bindings {

// Results of distribution_stats: inv_t, lse, cut, tie_id [R], mass [R, block_count(V)].
struct StatsTensors {
  Tensor inv_t, lse, cut, tie_id;
  Maybe mass;

  StatsTensors(const Matrix& m, bool masses)
      : StatsTensors(m, masses, m.type == Scalar::Float64 ? ScalarType::Double : ScalarType::Float) {}

 private:
  StatsTensors(const Matrix& m, bool masses, ScalarType type)
      : inv_t(empty({m.rows}, type)),
        lse(empty({m.rows}, type)),
        cut(empty({m.rows}, type)),
        tie_id(empty({m.rows}, ScalarType::Int)) {
    if (masses) mass = empty({m.rows, block_count(m.columns)}, type);
  }
};

// Logits [R, V], the checked sampling parameters [R] of their rows, and the tensors of their statistics.
inline LazyStats lazy_stats(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                            const Tensor& min_p, const StatsTensors& out) {
  const Matrix m = matrix(logits, "logits");
  const SamplingRows sampling{vector<float>(temperature, m.rows, "temperature"), vector<int32_t>(top_k, m.rows, "top_k"),
                              vector<float>(top_p, m.rows, "top_p"), vector<float>(min_p, m.rows, "min_p")};
  int64_t row = 0;
  const char* invalid = invalid_parameter(sampling, m.rows, &row);
  SPECDEC_CHECK(invalid == nullptr, "distribution_stats: ", invalid, "[", row, "] is out of range");
  return {m, sampling, out.inv_t.mutable_data_ptr(), out.lse.mutable_data_ptr(), out.cut.mutable_data_ptr(),
          data<int32_t>(out.tie_id), out.mass.has_value() ? out.mass->mutable_data_ptr() : nullptr};
}

}  // namespace specdec::bindings

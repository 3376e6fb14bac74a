// Distributions (logits [R, V], statistics [R]) and offsets [B + 1] as arguments, and verified paths as results.
#pragma once
#include "bindings/arguments.h"
#include "distribution/distribution.h"
#include "trees/tree.h"

namespace specdec::bindings {

using Maybe = std::optional<Tensor>;

inline Matrix matrix(const Tensor& logits, const char* what) {
  SPECDEC_CHECK(logits.dim() == 2, what, " has shape ", shape_of(logits), ", expected [rows, V]");
  const int64_t columns = logits.size(1);
  SPECDEC_CHECK(columns >= 1 && columns < (int64_t{1} << 31), what, " has ", columns, " columns");
  SPECDEC_CHECK(columns == 1 || logits.stride(1) == 1, what, " is not contiguous in its last dimension");
  return {logits.const_data_ptr(), logits.size(0), columns, logits.stride(0), scalar_of(logits, what)};
}

template <class T>
const T* vector(const Tensor& tensor, int64_t count, const char* what) {
  SPECDEC_CHECK(tensor.dim() == 1 && tensor.size(0) == count, what, " has shape ", shape_of(tensor), ", expected [",
                count, "]");
  return input<T>(tensor, what);
}

inline const void* statistic(const Tensor& tensor, const Matrix& logits, const char* what) {
  const bool wide = logits.type == Scalar::Float64;
  SPECDEC_CHECK(tensor.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), what,
                " has the wrong dtype, expected ", wide ? "float64" : "float32");
  SPECDEC_CHECK(tensor.dim() == 1 && tensor.size(0) == logits.rows && tensor.is_contiguous(), what, " has shape ",
                shape_of(tensor), ", expected contiguous [", logits.rows, "]");
  return tensor.const_data_ptr();
}

inline TokenDistributions dists_of(const Tensor& logits, const Tensor& inv_t, const Tensor& lse, const Tensor& cut, const Tensor& tie_id) {
  TokenDistributions dists;
  dists.logits = matrix(logits, "logits");
  dists.inv_t = statistic(inv_t, dists.logits, "inv_t");
  dists.lse = statistic(lse, dists.logits, "lse");
  dists.cut = statistic(cut, dists.logits, "cut");
  dists.tie_id = vector<int32_t>(tie_id, dists.logits.rows, "tie_id");
  return dists;
}

// Adds block masses [R, block_count(V)] from distribution_stats, if present.
inline void add_masses(TokenDistributions* dists, const Maybe& mass) {
  if (!mass.has_value()) return;
  const Matrix& logits = dists->logits;
  SPECDEC_CHECK(mass->dim() == 2 && mass->size(0) == logits.rows && mass->size(1) == block_count(logits.columns) &&
                    mass->is_contiguous(), "mass has shape ", shape_of(*mass));
  SPECDEC_CHECK(mass->scalar_type() == (dists->wide() ? ScalarType::Double : ScalarType::Float), "mass has the wrong dtype");
  dists->mass = mass->const_data_ptr();
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Checks the target's distributions of a draft's nodes, and gives the draft its own: *drafts, if there are logits.
template <class Draft>
void bind_dists(const TokenDistributions& target, const Maybe& logits, const Maybe& inv_t, const Maybe& lse, const Maybe& cut,
                const Maybe& tie_id, const Maybe& token_ids, TokenDistributions* drafts, Draft* draft) {
  SPECDEC_CHECK(target.logits.rows == draft->nodes, "target has ", target.logits.rows, " distributions for ", draft->nodes, " nodes");
  draft->dists = nullptr;
  draft->token_ids = nullptr;
  if (!logits.has_value()) return;
  *drafts = dists_of(*logits, inv_t.value(), lse.value(), cut.value(), tie_id.value());
  draft->dists = drafts;
  if (token_ids.has_value())
    draft->token_ids = vector<int64_t>(*token_ids, drafts->logits.columns, "token_ids");
  else
    SPECDEC_CHECK(drafts->logits.columns <= target.logits.columns, "draft distributions are wider than target distributions");
}

inline const int32_t* offsets_of(const Tensor& offsets, int64_t nodes, int64_t* rows) {
  SPECDEC_CHECK(offsets.dim() == 1 && offsets.size(0) >= 1, "offsets has shape ", shape_of(offsets));
  *rows = offsets.size(0) - 1;
  const int32_t* data = input<int32_t>(offsets, "offsets");
  SPECDEC_CHECK(valid_offsets(data, *rows, nodes), "offsets do not ascend from 0 to at most ", nodes);
  return data;
}

// path [B, max_depth + 1], num_accepted and next_token [B].
struct PathTensors {
  Tensor path, num_accepted, next_token;
  PathTensors(int64_t rows, int64_t max_depth)
      : path(empty({rows, max_depth + 1}, ScalarType::Int)),
        num_accepted(empty({rows}, ScalarType::Int)),
        next_token(empty({rows}, ScalarType::Long)) {}
  Path view(int64_t max_depth) const {
    return {data<int32_t>(path), data<int32_t>(num_accepted), data<int64_t>(next_token), max_depth};
  }
};

}  // namespace specdec::bindings

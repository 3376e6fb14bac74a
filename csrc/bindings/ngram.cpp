// torch.ops.specdec.ngram_match: schema and CPU implementation. The Python reference repeats failed checks
// with longer messages.
#include <tuple>

#include "bindings/arguments.h"
#include "ngram/match.h"

namespace specdec::bindings {
namespace {

std::tuple<Tensor, Tensor> ngram_match_cpu(Tensor tokens, Tensor starts, Tensor lengths, int64_t n_max, int64_t n_min,
                                           int64_t num_tokens, bool frequent) {
  SPECDEC_CHECK(tokens.dim() == 1 && starts.dim() == 1 && lengths.dim() == 1 && starts.numel() == lengths.numel(), "ngram_match: tokens ",
                shape_of(tokens), ", starts ", shape_of(starts), ", lengths ", shape_of(lengths), "; expected [N], [B], [B]");
  SPECDEC_CHECK(1 <= n_min && n_min <= n_max && num_tokens >= 0, "ngram_match: n_min ", n_min, ", n_max ", n_max, ", num_tokens ", num_tokens,
                "; expected 1 <= n_min <= n_max and num_tokens >= 0");
  const int64_t rows = starts.numel();
  const Histories in{input<int64_t>(tokens, "ngram_match: tokens"), input<int64_t>(starts, "ngram_match: starts"),
                     input<int32_t>(lengths, "ngram_match: lengths"), rows, tokens.numel()};
  const Tensor drafts = empty({rows, num_tokens}, ScalarType::Long), matched = empty({rows}, ScalarType::Int);
  const int64_t bad = ngram_match(in, {n_max, n_min, num_tokens, frequent}, static_cast<int64_t*>(drafts.mutable_data_ptr()),
                                  static_cast<int32_t*>(matched.mutable_data_ptr()));
  SPECDEC_CHECK(bad < 0, "ngram_match: row ", bad, " leaves the ", tokens.numel(), " tokens");
  return {drafts, matched};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("ngram_match(Tensor tokens, Tensor starts, Tensor lengths, int n_max, int n_min, int num_tokens, bool frequent) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("ngram_match", TORCH_BOX(&specdec::bindings::ngram_match_cpu)); }

// torch.ops.specdec.batch_invariant_linear: schema and CPU implementation. The Python reference repeats failed checks with
// longer messages (kernels/specdec_kernels/ops/batch_invariant_linear/reference.py).
#include "bindings/arguments.h"
#include "linear/batch_invariant_linear.h"

namespace specdec::bindings {
namespace {

Tensor batch_invariant_linear_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t isa) {
  SPECDEC_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), "batch_invariant_linear: x is ", shape_of(x), ", weight ",
                shape_of(weight), "; expected [..., K] and [N, K]");
  SPECDEC_CHECK(x.is_contiguous(), "batch_invariant_linear: x ", shape_of(x), " is not contiguous; call .contiguous()");
  SPECDEC_CHECK(x.scalar_type() == weight.scalar_type(), "batch_invariant_linear: x and weight differ in dtype");
  BatchInvariantLinear call;
  call.type = scalar_of(x, "batch_invariant_linear: x");
  call.outputs = weight.size(0);
  call.inputs = weight.size(1);
  call.by_input = weight.stride(0) == 1 && (weight.stride(1) != 1 || call.inputs == 1);
  SPECDEC_CHECK(call.by_input || weight.stride(1) == 1, "batch_invariant_linear: weight has strides ", weight.stride(0), ", ", weight.stride(1),
                "; expected 1 in one of the two");
  call.stride = call.by_input ? weight.stride(1) : weight.stride(0);
  if (bias.has_value()) {
    SPECDEC_CHECK(bias->dim() == 1 && bias->size(0) == call.outputs && bias->is_contiguous() && bias->scalar_type() == x.scalar_type(),
                  "batch_invariant_linear: bias is ", shape_of(*bias), "; expected [", call.outputs, "] in the dtype of x");
    call.bias = bias->const_data_ptr();
  }
  SPECDEC_CHECK(isa >= 0 && isa <= 3, "batch_invariant_linear: isa is ", isa, ", expected 0 (best), 1 (portable), 2 (AVX2) or 3 (AVX-512)");
  int64_t sizes[kMostDimensions];
  const size_t rank = static_cast<size_t>(x.dim());
  SPECDEC_CHECK(rank <= kMostDimensions, "batch_invariant_linear: x has ", rank, " dimensions; expected at most ", kMostDimensions);
  call.rows = 1;
  for (size_t i = 0; i + 1 < rank; ++i) call.rows *= sizes[i] = x.size(static_cast<int64_t>(i));
  sizes[rank - 1] = call.outputs;
  const Tensor out = empty_on_cpu(sizes, rank, dtype_of(x));
  call.x = x.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.out = out.mutable_data_ptr();
  if (call.rows > 0 && call.outputs > 0) batch_invariant_linear(call, static_cast<Isa>(isa));
  return out;
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) { m.def("batch_invariant_linear(Tensor x, Tensor weight, Tensor? bias, int isa=0) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("batch_invariant_linear", TORCH_BOX(&specdec::bindings::batch_invariant_linear_cpu)); }

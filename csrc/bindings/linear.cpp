// torch.ops.specdec.{batch_invariant_linear, batch_invariant_linear_int8, batch_invariant_linear_isa}: schemas and CPU
// implementations. The Python references repeat failed checks with longer messages
// (kernels/specdec_kernels/ops/batch_invariant_linear/reference.py).
#include "bindings/arguments.h"
#include "linear/batch_invariant_linear.h"

namespace specdec::bindings {
namespace {

// Everything but the kind of the weight.
Tensor product(const char* op, const Tensor& x, const Tensor& weight, const float* scale, const std::optional<Tensor>& bias, int64_t isa) {
  SPECDEC_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), op, ": x is ", shape_of(x), ", weight ", shape_of(weight),
                "; expected [..., K] and [N, K]");
  SPECDEC_CHECK(x.is_contiguous(), op, ": x ", shape_of(x), " is not contiguous; call .contiguous()");
  BatchInvariantLinear call;
  call.type = scalar_of(x, op);
  call.outputs = weight.size(0);
  call.inputs = weight.size(1);
  call.by_input = scale == nullptr && weight.stride(0) == 1 && (weight.stride(1) != 1 || call.inputs == 1);
  SPECDEC_CHECK(call.by_input || weight.stride(1) == 1 || call.inputs == 1, op, ": weight has strides ", weight.stride(0), ", ", weight.stride(1),
                "; expected 1 in ", scale == nullptr ? "one of the two" : "the second");
  call.stride = call.by_input ? weight.stride(1) : weight.stride(0);
  call.scale = scale;
  if (bias.has_value()) {
    SPECDEC_CHECK(bias->dim() == 1 && bias->size(0) == call.outputs && bias->is_contiguous() && bias->scalar_type() == x.scalar_type(), op,
                  ": bias is ", shape_of(*bias), "; expected [", call.outputs, "] in the dtype of x");
    call.bias = bias->const_data_ptr();
  }
  SPECDEC_CHECK(isa >= 0 && isa <= 5, op, ": isa is ", isa,
                ", expected 0 (best), 1 (portable), 2 (AVX2), 3 (AVX-512), 4 (AVX-512 BF16) or 5 (AMX)");
  int64_t sizes[kMostDimensions];
  const size_t rank = static_cast<size_t>(x.dim());
  SPECDEC_CHECK(rank <= kMostDimensions, op, ": x has ", rank, " dimensions; expected at most ", kMostDimensions);
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

Tensor batch_invariant_linear_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t isa) {
  SPECDEC_CHECK(x.scalar_type() == weight.scalar_type(), "batch_invariant_linear: x and weight differ in dtype");
  return product("batch_invariant_linear", x, weight, nullptr, bias, isa);
}

Tensor batch_invariant_linear_int8_cpu(const Tensor& x, const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& bias, int64_t isa) {
  constexpr const char* kOp = "batch_invariant_linear_int8";
  SPECDEC_CHECK(weight.scalar_type() == ScalarType::Char && weight.dim() == 2, kOp, ": weight is ", shape_of(weight), "; expected int8 [N, K]");
  SPECDEC_CHECK(x.scalar_type() != ScalarType::Double, kOp, ": x is float64; expected float32, bfloat16 or float16");
  SPECDEC_CHECK(scale.dim() == 1 && scale.size(0) == weight.size(0), kOp, ": scale is ", shape_of(scale), "; expected [", weight.size(0), "]");
  return product(kOp, x, weight, input<float>(scale, "batch_invariant_linear_int8: scale"), bias, isa);
}

// The instruction set that multiplies rows like x with a weight stored by output.
int64_t batch_invariant_linear_isa_cpu(const Tensor& x) {
  return static_cast<int64_t>(x.scalar_type() == ScalarType::BFloat16 ? best_bfloat16_isa() : best_isa());
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("batch_invariant_linear(Tensor x, Tensor weight, Tensor? bias, int isa=0) -> Tensor");
  m.def("batch_invariant_linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int isa=0) -> Tensor");
  m.def("batch_invariant_linear_isa(Tensor x) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("batch_invariant_linear", TORCH_BOX(&specdec::bindings::batch_invariant_linear_cpu));
  m.impl("batch_invariant_linear_int8", TORCH_BOX(&specdec::bindings::batch_invariant_linear_int8_cpu));
  m.impl("batch_invariant_linear_isa", TORCH_BOX(&specdec::bindings::batch_invariant_linear_isa_cpu));
}

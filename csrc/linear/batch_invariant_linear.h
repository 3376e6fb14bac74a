// Products of few rows x [rows, inputs] with a weight matrix [outputs, inputs] on the CPU, on plain pointers.
// kernels/specdec_kernels/ops/batch_invariant_linear/reference.py specifies it.
#pragma once
#include <cstdint>

#include "isa.h"
#include "scalar.h"

namespace specdec {

// Strides are in elements; x is contiguous.
struct BatchInvariantLinear {
  Scalar type = Scalar::Float32;  // of all tensors but an int8 weight
  const void *x = nullptr, *weight = nullptr;
  const float* scale = nullptr;  // [outputs] for an int8 weight, whose values are weight * scale; null for other weights
  const void* bias = nullptr;    // [outputs]; may be null
  void* out = nullptr;         // [rows, outputs]
  int64_t rows = 0, inputs = 0, outputs = 0;
  int64_t out_stride = 0;  // between the rows of out; 0: outputs
  int64_t stride = 0;      // between the inputs of an output (by_input) or between outputs
  bool by_input = false;   // the outputs of one input are contiguous; otherwise the inputs of one output are
};

// Batch invariant: `inputs` and the layout alone determine the order of additions, so a row's bits do not depend on other
// rows or the number of threads. `isa` is for tests.
void batch_invariant_linear(const BatchInvariantLinear& call, Isa isa = Isa::Best);
// Several products with the same x, type and layout in one parallel loop.
void batch_invariant_linear(const BatchInvariantLinear* calls, int64_t count, Isa isa = Isa::Best);

// --- internal to this folder ---

inline int64_t out_stride(const BatchInvariantLinear& call) { return call.out_stride == 0 ? call.outputs : call.out_stride; }

constexpr int64_t kColumns = 64;  // outputs per piece of work; pieces start at multiples of it

// Outputs [begin, end) of all rows. x: float32 [rows, inputs], unless another form is named.
using ColumnKernel = void (*)(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
void columns_portable(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
#if defined(__x86_64__)
void columns_avx2(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
void columns_avx512(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
// bfloat16 weights stored by output; x is call.x.
void columns_avx512_bf16(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
// bfloat16 or int8 weights stored by output, x bfloat16; x is what pack_rows_amx wrote.
void columns_amx(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end);
int64_t packed_bytes_amx(const BatchInvariantLinear& call);
void pack_rows_amx(const BatchInvariantLinear& call, void* packed);
#endif

}  // namespace specdec

// Products of few rows with a weight matrix on the CPU, in terms of plain pointers. The contract is written down in
// kernels/specdec_kernels/ops/batch_invariant_linear/reference.py.
#pragma once
#include <cstdint>

#include "isa.h"
#include "scalar.h"

namespace specdec {

// Strides count elements; x is contiguous.
struct BatchInvariantLinear {
  Scalar type = Scalar::Float32;  // of everything
  const void *x = nullptr, *weight = nullptr;
  const void* bias = nullptr;  // [outputs]; may be null
  void* out = nullptr;
  int64_t rows = 0, inputs = 0, outputs = 0;
  int64_t out_stride = 0;  // between the rows of out; 0: outputs
  int64_t stride = 0;      // between the inputs of an output (by_input) or between outputs
  bool by_input = false;   // the outputs of one input lie side by side; otherwise the inputs of one output do
};

// Sums of one output are added in an order that `inputs` and the layout alone decide: a row has the same bits whatever
// rows are beside it and however many threads run. `isa` is for tests.
void batch_invariant_linear(const BatchInvariantLinear& call, Isa isa = Isa::Best);
// Several with one x, in one go.
void batch_invariant_linear(const BatchInvariantLinear* calls, int64_t count, Isa isa = Isa::Best);

// --- between the files of this folder ---

inline int64_t out_stride(const BatchInvariantLinear& call) { return call.out_stride == 0 ? call.outputs : call.out_stride; }

constexpr int64_t kColumns = 64;  // pieces for threads begin at multiples of it

// Outputs [begin, end) of all rows of a float32, bfloat16 or float16 call; x: float32 [rows, inputs].
using ColumnKernel = void (*)(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
void columns_portable(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
#if defined(__x86_64__)
void columns_avx2(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
void columns_avx512(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
#endif

}  // namespace specdec

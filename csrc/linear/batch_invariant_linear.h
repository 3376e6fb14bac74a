// Products of few rows x [rows, inputs] with a weight matrix [outputs, inputs] on the CPU, on plain pointers.
// kernels/specdec_kernels/ops/batch_invariant_linear/reference.py specifies it.
#pragma once
#include <cstdint>

#include "isa.h"
#include "scalar.h"

namespace specdec {

// Strides are in elements; x is contiguous.
struct BatchInvariantLinear {
  Scalar type = Scalar::Float32;  // of all tensors
  const void *x = nullptr, *weight = nullptr;
  const void* bias = nullptr;  // [outputs]; may be null
  void* out = nullptr;         // [rows, outputs]
  int64_t rows = 0, inputs = 0, outputs = 0;
  int64_t out_stride = 0;  // between the rows of out; 0: outputs
  int64_t stride = 0;      // between the inputs of an output (by_input) or between outputs
  bool by_input = false;   // the outputs of one input are contiguous; otherwise the inputs of one output are
};

// Batch invariant: `inputs` and the layout alone determine the order of additions, so a row's bits do not depend on other
// rows or the number of threads. `isa` is for tests.
void batch_invariant_linear(const BatchInvariantLinear& call, Isa isa = Isa::Best);
// Several products with the same x in one parallel loop.
void batch_invariant_linear(const BatchInvariantLinear* calls, int64_t count, Isa isa = Isa::Best);

// --- internal to this folder ---

inline int64_t out_stride(const BatchInvariantLinear& call) { return call.out_stride == 0 ? call.outputs : call.out_stride; }

constexpr int64_t kColumns = 64;  // outputs per piece of work; pieces start at multiples of it

// Outputs [begin, end) of all rows of a float32, bfloat16 or float16 call; x: float32 [rows, inputs].
using ColumnKernel = void (*)(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
void columns_portable(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
#if defined(__x86_64__)
void columns_avx2(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
void columns_avx512(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end);
#endif

}  // namespace specdec

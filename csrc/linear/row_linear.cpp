#include "linear/row_linear.h"

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

// Multiplications that a thread is worth starting for. Below three rows reading the weights takes the time.
constexpr int64_t kGrain = 1 << 17;

ColumnKernel kernel_for(Isa isa) {
#if defined(__x86_64__)
  if (usable(isa) == Isa::Avx512) return columns_avx512;
  if (usable(isa) == Isa::Avx2) return columns_avx2;
#endif
  (void)isa;
  return columns_portable;
}

void in_double(const RowLinear& call, int64_t begin, int64_t end) {
  const double *x = static_cast<const double*>(call.x), *weight = static_cast<const double*>(call.weight);
  const int64_t per_input = call.by_input ? call.stride : 1, per_output = call.by_input ? 1 : call.stride;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t n = begin; n < end; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < call.inputs; ++k) sum += x[row * call.inputs + k] * weight[k * per_input + n * per_output];
      if (call.bias != nullptr) sum += static_cast<const double*>(call.bias)[n];
      static_cast<double*>(call.out)[row * call.outputs + n] = sum;
    }
  }
}

// x in float32; the caller's where it is.
const float* widened(const RowLinear& call, std::vector<float>& memory) {
  if (call.type == Scalar::Float32 || call.type == Scalar::Float64) return static_cast<const float*>(call.x);
  memory.resize(static_cast<size_t>(call.rows * call.inputs));
  with_scalar(call.type, [&](auto type) {
    using T = decltype(type);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(widen(static_cast<const T*>(call.x)[i]));
  });
  return memory.data();
}

}  // namespace

void row_linear(const RowLinear& call, Isa isa) {
  static thread_local std::vector<float> memory;
  const float* x = widened(call, memory);
  const ColumnKernel kernel = kernel_for(isa);
  const int64_t pieces = (call.outputs + kColumns - 1) / kColumns;
  const int64_t products = std::max<int64_t>(call.rows, 3) * call.inputs * kColumns;
  parallel_for(0, pieces, std::max<int64_t>(1, kGrain / std::max<int64_t>(products, 1)), [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kColumns, call.outputs);
    if (call.type == Scalar::Float64) return in_double(call, begin * kColumns, last);
    kernel(call, x, begin * kColumns, last);
  });
}

}  // namespace specdec

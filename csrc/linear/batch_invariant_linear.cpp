#include "linear/batch_invariant_linear.h"

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

// Multiplications per piece of work that justify another thread. Below three rows the time goes into reading the weights.
constexpr int64_t kGrain = 1 << 17;

bool by_pairs(const BatchInvariantLinear& call) { return call.type == Scalar::BFloat16 && !call.by_input; }

ColumnKernel kernel_for(const BatchInvariantLinear& call, Isa isa) {
#if defined(__x86_64__)
  if (by_pairs(call)) {
    const Isa pairs = usable_for_bfloat16(isa);
    if (pairs == Isa::Amx) return columns_amx;
    if (pairs == Isa::Avx512Bf16 && call.scale == nullptr) return columns_avx512_bf16;
  }
  if (usable(isa) == Isa::Avx512) return columns_avx512;
  if (usable(isa) == Isa::Avx2) return columns_avx2;
#endif
  (void)call;
  (void)isa;
  return columns_portable;
}

void in_double(const BatchInvariantLinear& call, int64_t begin, int64_t end) {
  const double *x = static_cast<const double*>(call.x), *weight = static_cast<const double*>(call.weight);
  const int64_t per_input = call.by_input ? call.stride : 1, per_output = call.by_input ? 1 : call.stride;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t n = begin; n < end; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < call.inputs; ++k) sum += x[row * call.inputs + k] * weight[k * per_input + n * per_output];
      if (call.bias != nullptr) sum += static_cast<const double*>(call.bias)[n];
      static_cast<double*>(call.out)[row * out_stride(call) + n] = sum;
    }
  }
}

// x as float32; the caller's memory if it already is.
const float* widened(const BatchInvariantLinear& call, std::vector<float>& memory) {
  if (call.type == Scalar::Float32 || call.type == Scalar::Float64) return static_cast<const float*>(call.x);
  memory.resize(static_cast<size_t>(call.rows * call.inputs));
  with_scalar(call.type, [&](auto type) {
    using T = decltype(type);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(widen(static_cast<const T*>(call.x)[i]));
  });
  return memory.data();
}

// The rows of x in the form that `kernel` reads; the caller's memory if it has that form.
const void* prepared(const BatchInvariantLinear& call, ColumnKernel kernel, std::vector<float>& memory) {
#if defined(__x86_64__)
  if (kernel == columns_avx512_bf16) return call.x;
  if (kernel == columns_amx) {
    constexpr size_t kAlignment = 64;
    memory.resize((static_cast<size_t>(packed_bytes_amx(call)) + kAlignment) / sizeof(float) + 1);
    void* packed = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + kAlignment - 1) / kAlignment * kAlignment);
    pack_rows_amx(call, packed);
    return packed;
  }
#endif
  return widened(call, memory);
}

}  // namespace

void batch_invariant_linear(const BatchInvariantLinear* calls, int64_t count, Isa isa) {
  static thread_local std::vector<float> memory;
  const ColumnKernel kernel = kernel_for(calls[0], isa);
  const void* x = prepared(calls[0], kernel, memory);
  const auto pieces_of = [](const BatchInvariantLinear& call) { return (call.outputs + kColumns - 1) / kColumns; };
  int64_t pieces = 0;
  for (int64_t c = 0; c < count; ++c) pieces += pieces_of(calls[c]);
  const int64_t products = std::max<int64_t>(calls[0].rows, 3) * calls[0].inputs * kColumns;
  parallel_for(0, pieces, std::max<int64_t>(1, kGrain / std::max<int64_t>(products, 1)), [&](int64_t begin, int64_t end) {
    for (const BatchInvariantLinear* call = calls; end > 0; ++call) {
      const int64_t own = pieces_of(*call), stop = std::min(end, own);
      if (begin < stop) {
        const int64_t last = std::min(stop * kColumns, call->outputs);
        call->type == Scalar::Float64 ? in_double(*call, begin * kColumns, last) : kernel(*call, x, begin * kColumns, last);
      }
      begin = std::max<int64_t>(begin - own, 0);
      end -= own;
    }
  });
}

void batch_invariant_linear(const BatchInvariantLinear& call, Isa isa) { batch_invariant_linear(&call, 1, isa); }

}  // namespace specdec

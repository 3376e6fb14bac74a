// batch_invariant_linear with the products of bfloat16 pairs of AVX-512 BF16 (vdpbf16ps). batch_invariant_linear.cpp calls it
// only on processors that have them. The instruction takes subnormal numbers as zero.
#include "linear/batch_invariant_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif

namespace specdec {
namespace {
#define SPECDEC_LANES 16
#include "simd.h"

constexpr int64_t kPairs = 32;  // inputs per instruction and output

inline __m512bh whole_of(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh part_of(const BFloat16* from, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, from); }

// R rows by kLanes / R outputs: kLanes dot products, reduced together at the end. FIRST: the weights come from memory, and those
// of the next outputs are prefetched.
template <int R, bool FIRST>
inline void pairs(const BatchInvariantLinear& call, const BFloat16* x, int64_t row, int64_t column, int64_t end) {
  constexpr int kOutputs = kLanes / R;
  const int64_t count = end - column < kOutputs ? end - column : kOutputs, whole = call.inputs / kPairs * kPairs;
  const __mmask32 rest = static_cast<__mmask32>((uint64_t{1} << (call.inputs - whole)) - 1);
  const BFloat16* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) weights[i] = static_cast<const BFloat16*>(call.weight) + (column + (i < count ? i : 0)) * call.stride;
  __m512 sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = _mm512_setzero_ps();
  const BFloat16* from = x + row * call.inputs;
  for (int64_t k = 0; k < whole; k += kPairs) {
    __m512bh factors[R];
    for (int r = 0; r < R; ++r) factors[r] = whole_of(from + r * call.inputs + k);
    for (int i = 0; i < kOutputs; ++i) {
      const __m512bh values = whole_of(weights[i] + k);
      if constexpr (FIRST) _mm_prefetch(reinterpret_cast<const char*>(weights[i] + kLanes * call.stride + k), _MM_HINT_T0);
      for (int r = 0; r < R; ++r) sums[r * kOutputs + i] = _mm512_dpbf16_ps(sums[r * kOutputs + i], factors[r], values);
    }
  }
  for (int i = 0; i < kOutputs && rest != 0; ++i) {
    const __m512bh values = part_of(weights[i] + whole, rest);
    for (int r = 0; r < R; ++r) {
      sums[r * kOutputs + i] = _mm512_dpbf16_ps(sums[r * kOutputs + i], part_of(from + r * call.inputs + whole, rest), values);
    }
  }
  Floats lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = (Floats)sums[i];
  float joined[kLanes];
  store(joined, totals(lanes));
  const BFloat16* bias = call.bias == nullptr ? nullptr : static_cast<const BFloat16*>(call.bias) + column;
  for (int r = 0; r < R; ++r) {
    BFloat16* to = static_cast<BFloat16*>(call.out) + (row + r) * out_stride(call) + column;
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<BFloat16>(joined[r * kOutputs + i] + (bias == nullptr ? 0.0f : widen(bias[i])));
  }
}

}  // namespace

void columns_avx512_bf16(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end) {
  const BFloat16* rows = static_cast<const BFloat16*>(x);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t last = end - first < kLanes ? end : first + kLanes;
    int64_t row = 0;
    const auto rows_of = [&](auto many) {
      constexpr int kRows = decltype(many)::value;
      for (; row + kRows <= call.rows; row += kRows)
        for (int64_t column = first; column < last; column += kLanes / kRows) {
          if (row == 0) {
            pairs<kRows, true>(call, rows, row, column, last);
          } else {
            pairs<kRows, false>(call, rows, row, column, last);
          }
        }
    };
    rows_of(std::integral_constant<int, 4>{});
    rows_of(std::integral_constant<int, 2>{});
    rows_of(std::integral_constant<int, 1>{});
  }
}

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// The vector code of batch_invariant_linear for AVX2 with FMA and F16C. batch_invariant_linear.cpp calls it only on
// processors that have them.
#include "linear/batch_invariant_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace specdec {
namespace {
#define SPECDEC_LANES 8
#include "simd.h"
#include "linear/columns_body.h"
}  // namespace

void columns_avx2(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end) {
  columns(call, static_cast<const float*>(x), begin, end);
}

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

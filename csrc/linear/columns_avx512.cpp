// The vector code of batch_invariant_linear for AVX-512. batch_invariant_linear.cpp calls it only on processors that have
// it.
#include "linear/batch_invariant_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace specdec {
namespace {
#define SPECDEC_LANES 16
#include "simd.h"
#include "linear/columns_body.h"
}  // namespace

void columns_avx512(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end) {
  columns(call, static_cast<const float*>(x), begin, end);
}

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// Norm, rotary embedding and gated activation for AVX-512. fused_forward.cpp calls them only on processors that have it.
#include "decoder/fused_forward.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

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
#include "decoder/norm_rope_activation.h"
}  // namespace

const ElementwiseIsa kAvx512Elementwise = {kElementwise<float>, kElementwise<BFloat16>};

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// The vector code of recurrent layers for AVX-512. recurrence.cpp selects it only on processors that have it.
#include "recurrent/convolution.h"

#if defined(__x86_64__)
#include <immintrin.h>

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
#include "recurrent/recurrence_body.h"
#include "recurrent/convolution_body.h"
}  // namespace

const RecurrentKernels kAvx512Recurrent = {kTile, widen_elements, exponentials, dots, walk, replay, convolve};

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

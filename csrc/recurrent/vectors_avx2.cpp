// The vector code of recurrent layers for AVX2 with FMA and F16C. recurrence.cpp selects it only on processors that have
// them.
#include "recurrent/convolution.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace specdec {
namespace {
#define SPECDEC_LANES 8
#include "simd.h"
#include "recurrent/recurrence_body.h"
#include "recurrent/convolution_body.h"
}  // namespace

const RecurrentKernels kAvx2Recurrent = {kTile, widen_elements, exponentials, dots, walk, replay, convolve};

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

// The tile kernel for AVX2 with FMA and F16C. tree_attention.cpp calls it only on processors that have them.
#include "attention/tree_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <utility>

#include "attention/visibility.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace specdec {
namespace {
#define SPECDEC_LANES 8
#include "simd.h"
#include "attention/tile_products.h"
#include "attention/tile_kernel.h"
}  // namespace
}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace specdec {
const TileKernel kAvx2Tile = {kLanes, attend, merge, finish};
}  // namespace specdec
#endif

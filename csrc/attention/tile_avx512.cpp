// The tile kernel for AVX-512. tree_attention.cpp calls it only on processors that have it.
#include "attention/tree_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <utility>

#include "attention/visibility.h"

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
#include "attention/tile_products.h"
#include "attention/tile_kernel.h"
}  // namespace
}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace specdec {
const TileKernel kAvx512Tile = {kLanes, attend, merge, finish};
}  // namespace specdec
#endif

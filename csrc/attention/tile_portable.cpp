// The tile kernel for all other processors: four lanes, which compilers map to SSE2 and NEON.
#include "attention/tree_attention.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <utility>

#include "attention/visibility.h"

namespace specdec {
namespace {
#define SPECDEC_LANES 4
#include "simd.h"
#include "attention/tile_products.h"
#include "attention/tile_kernel.h"
}  // namespace

const TileKernel kPortableTile = {kLanes, attend, merge, finish};

}  // namespace specdec

// The vector code between a decoder's matrices for every other processor: four lanes, which compilers map to SSE2 and NEON.
#include "decoder/fused_forward.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstddef>
#include <utility>

namespace specdec {
namespace {
#define SPECDEC_LANES 4
#include "simd.h"
#include "decoder/norm_rope_activation.h"
}  // namespace

const ElementwiseKernels kPortableElementwise = {norm, rotate, gate};

}  // namespace specdec

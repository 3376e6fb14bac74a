// Norm, rotary embedding and gated activation for all other processors: four lanes, mapped to SSE2 and NEON by compilers.
#include "decoder/fused_forward.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace specdec {
namespace {
#define SPECDEC_LANES 4
#include "simd.h"
#include "decoder/norm_rope_activation.h"
}  // namespace

const ElementwiseIsa kPortableElementwise = {kElementwise<float>, kElementwise<BFloat16>};

}  // namespace specdec

// The vector code of recurrent layers for all other processors: four lanes, which compilers map to SSE2 and NEON.
#include "recurrent/convolution.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <type_traits>
#include <utility>

namespace specdec {
namespace {
#define SPECDEC_LANES 4
#include "simd.h"
#include "recurrent/recurrence_body.h"
#include "recurrent/convolution_body.h"
}  // namespace

const RecurrentKernels kPortableRecurrent = {kTile, widen_elements, exponentials, dots, walk, replay, convolve};

}  // namespace specdec

// The vector code of batch_invariant_linear for all other processors: four lanes, which compilers map to SSE2 and NEON.
#include "linear/batch_invariant_linear.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

namespace specdec {
namespace {
#define SPECDEC_LANES 4
#include "simd.h"
#include "linear/columns_body.h"
}  // namespace

void columns_portable(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end) {
  columns(call, static_cast<const float*>(x), begin, end);
}

}  // namespace specdec

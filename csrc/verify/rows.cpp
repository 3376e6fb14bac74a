#include "verify/rows.h"

#include <cstdlib>
#include <cstring>

namespace specdec {
namespace {

// SPECDEC_ISA=portable|avx2|avx512 lowers the choice (for tests and comparisons); it never exceeds the machine's.
const RowKernels& choose() {
#ifdef SPECDEC_X86
  const char* wish = std::getenv("SPECDEC_ISA");
  const bool portable = wish && std::strcmp(wish, "portable") == 0;
  const bool avx2 = wish && std::strcmp(wish, "avx2") == 0;
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !portable && !avx2) return kAvx512Rows;
  if (has_avx2 && !portable) return kAvx2Rows;
#endif
  return kPortableRows;
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& chosen = choose();
  return chosen;
}

}  // namespace specdec

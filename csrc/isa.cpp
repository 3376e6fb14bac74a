#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace specdec {
namespace {

Isa of_machine() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = fused && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? Isa::Avx512 : fused ? Isa::Avx2 : Isa::Portable;
#else
  return Isa::Portable;
#endif
}

Isa wished() {
  const char* wish = std::getenv("SPECDEC_ISA");
  if (wish != nullptr && std::strcmp(wish, "portable") == 0) return Isa::Portable;
  if (wish != nullptr && std::strcmp(wish, "avx2") == 0) return Isa::Avx2;
  return Isa::Avx512;
}

}  // namespace

Isa best_isa() {
  static const Isa best = std::min(of_machine(), wished());
  return best;
}

}  // namespace specdec

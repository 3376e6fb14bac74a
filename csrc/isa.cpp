#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec {
namespace {

#if defined(__x86_64__)
bool has_bfloat16_pairs() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0;
}

// Linux gives the state of tiles to processes that ask for it.
bool has_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool known = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 22)) != 0 && (d & (1u << 24)) != 0;  // AMX-BF16, AMX-TILE
  return known && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
  if (wish != nullptr && std::strcmp(wish, "avx512") == 0) return Isa::Avx512;
  if (wish != nullptr && std::strcmp(wish, "avx512bf16") == 0) return Isa::Avx512Bf16;
  return Isa::Amx;
}

// The best instruction set with products of bfloat16 pairs that the machine has and the user wishes, or best_isa().
Isa with_bfloat16() {
#if defined(__x86_64__)
  if (best_isa() == Isa::Avx512 && wished() >= Isa::Avx512Bf16 && has_bfloat16_pairs()) {
    return wished() == Isa::Amx && has_tiles() ? Isa::Amx : Isa::Avx512Bf16;
  }
#endif
  return best_isa();
}

}  // namespace

Isa best_bfloat16_isa() {
  static const Isa best = with_bfloat16();
  return best;
}

Isa best_isa() {
  static const Isa best = std::min(of_machine(), wished());
  return best;
}

}  // namespace specdec

// The instruction set that the vector code of this process uses.
#pragma once

namespace specdec {

// Each includes the ones before it. The last two add products of bfloat16 pairs, which linear/ alone uses.
enum class Isa : int { Best, Portable, Avx2, Avx512, Avx512Bf16, Amx };

// The value of Isa::Best for vectors of floats: the best of the machine up to Avx512, limited by
// SPECDEC_ISA=portable|avx2|avx512.
Isa best_isa();
// The value of Isa::Best for products of bfloat16, limited by SPECDEC_ISA=portable|avx2|avx512|avx512bf16|amx.
Isa best_bfloat16_isa();

// `wish`, or the best one if this machine lacks it.
inline Isa usable(Isa wish) { return wish == Isa::Best || static_cast<int>(wish) > static_cast<int>(best_isa()) ? best_isa() : wish; }
inline Isa usable_for_bfloat16(Isa wish) {
  return wish == Isa::Best || static_cast<int>(wish) > static_cast<int>(best_bfloat16_isa()) ? best_bfloat16_isa() : wish;
}

}  // namespace specdec

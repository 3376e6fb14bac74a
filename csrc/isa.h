// Which instruction set the vector code of this process uses.
#pragma once

namespace specdec {

enum class Isa : int { Best, Portable, Avx2, Avx512 };

// The instruction set that Isa::Best stands for: the machine's, lowered by SPECDEC_ISA=portable|avx2|avx512.
Isa best_isa();

// `wish`, or the best one where this machine lacks it.
inline Isa usable(Isa wish) { return wish == Isa::Best || static_cast<int>(wish) > static_cast<int>(best_isa()) ? best_isa() : wish; }

}  // namespace specdec

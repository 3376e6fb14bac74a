// The instruction set that the vector code of this process uses.
#pragma once

namespace specdec {

enum class Isa : int { Best, Portable, Avx2, Avx512 };

// The value of Isa::Best: the best instruction set of the machine, limited by SPECDEC_ISA=portable|avx2|avx512.
Isa best_isa();

// `wish`, or the best one if this machine lacks it.
inline Isa usable(Isa wish) { return wish == Isa::Best || static_cast<int>(wish) > static_cast<int>(best_isa()) ? best_isa() : wish; }

}  // namespace specdec

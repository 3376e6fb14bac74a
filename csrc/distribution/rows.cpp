#include "distribution/rows.h"

#include "isa.h"

namespace specdec {

const RowKernels& row_kernels() {
#ifdef SPECDEC_X86
  if (best_isa() == Isa::Avx512) return kAvx512Rows;
  if (best_isa() == Isa::Avx2) return kAvx2Rows;
#endif
  return kPortableRows;
}

}  // namespace specdec

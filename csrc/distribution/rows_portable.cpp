// Row passes with 128-bit vectors: SSE2 on x86-64, NEON on aarch64, compiler-generated code elsewhere.
#define SPECDEC_LANES 4
#define SPECDEC_ISA isa_portable
#define SPECDEC_TABLE kPortableRows
#define SPECDEC_NAME "portable"
#include "distribution/rows_body.h"

// Row passes compiled for AVX2. Standard headers come first: the linker may keep this file's copy of their inline functions
// for the whole program, so they must not use these instructions.
#include "distribution/rows.h"

#ifdef SPECDEC_X86
#include <cfloat>
#include <cmath>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define SPECDEC_LANES 8
#define SPECDEC_ISA isa_avx2
#define SPECDEC_TABLE kAvx2Rows
#define SPECDEC_NAME "avx2"
#include "distribution/rows_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

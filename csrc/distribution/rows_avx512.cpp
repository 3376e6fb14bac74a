// Row passes compiled for AVX-512. Standard headers come first: the linker may keep this file's copy of their inline functions
// for the whole program, so they must not use these instructions.
#include "distribution/rows.h"

#ifdef SPECDEC_X86
#include <cfloat>
#include <cmath>
#include <cstring>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
// GCC 12 warns about its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#define SPECDEC_LANES 16
#define SPECDEC_ISA isa_avx512
#define SPECDEC_TABLE kAvx512Rows
#define SPECDEC_NAME "avx512"
#include "distribution/rows_body.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

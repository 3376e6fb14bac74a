// Vectorised passes over (pieces of) one row of logits, compiled once per instruction set and chosen at load.
#pragma once
#include <cstdint>

#include "random.h"
#include "scalar.h"

namespace specdec {

// weight(v) = exp(l * inv_t - lse) if l > cut or (l == cut and v <= tie_id) else 0
template <class Real>
struct LawRow {
  Real inv_t, lse, cut;
  int32_t tie_id;
  bool keeps(Real level, int64_t id) const { return level > cut || (level == cut && id <= tie_id); }
};

// Largest element, the lowest id that has it, and whether there is a NaN. -inf and id 0 for nothing but -inf.
template <class Real>
struct Peak {
  Real level;
  int32_t id;
  bool nan;
};

// log2 of the sum of 2^(l * inv_t / ln 2), and the largest element. NaN for a NaN or +inf element.
template <class Real>
struct Mass {
  Real peak;
  double log2_sum;
};

// A running argmax: strictly larger wins, so equal scores keep the lower id when ids come in order.
template <class Real>
struct Best {
  Real score;
  int32_t id;
};

template <class Real>
struct Entry {
  Real level;
  int32_t id;
};

// Buffers of one race block are padded with zeros up to a multiple of this.
constexpr int kPad = 32;

// Pointers to functions for float accumulation; arrays are indexed by Scalar (Float32, BFloat16, Half).
struct RowKernels {
  const char* name;
  Mass<float> (*mass[3])(const void* row, int64_t count, float inv_t);
  Peak<float> (*peak[3])(const void* row, int64_t count);
  // Largest element that is not NaN (-inf if there is none).
  float (*largest[3])(const void* row, int64_t count);
  // Sum of exp(double(l * inv_t) - top), for exact nuclei.
  double (*mass64[3])(const void* row, int64_t count, float inv_t, double top);
  // Appends the elements >= threshold in id order; returns how many.
  int64_t (*collect[3])(const void* row, int64_t count, float threshold, Entry<float>* out);
  // Weights of tokens first .. first + count - 1 (count <= kRaceBlock), zero padded.
  void (*weights[3])(const void* piece, int count, int32_t first, const LawRow<float>& law, float* out);
  // argmax of l * inv_t + gumbel over the kept tokens of one block; `top` bounds its elements from above.
  void (*replay[3])(const void* piece, int count, int32_t first, const LawRow<float>& law, const Counter& counter,
                    float top, Best<float>* best);
  // p = max(p - q, 0)
  void (*subtract)(float* p, const float* q, int count);
  double (*total)(const float* weights, int count);
  // argmax of log(weight) + gumbel over the tokens first .. first + count - 1; first is a multiple of four.
  void (*race)(const float* weights, int count, int32_t first, const Counter& counter, Best<float>* best);
  // Gumbel noise of tokens 0 .. count - 1.
  void (*gumbel_row)(const Counter& counter, int64_t count, float* out);
};

const RowKernels& row_kernels();

extern const RowKernels kPortableRows;
#if defined(__x86_64__) && defined(__GNUC__)
#define SPECDEC_X86 1
extern const RowKernels kAvx2Rows, kAvx512Rows;
#endif

}  // namespace specdec

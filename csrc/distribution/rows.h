// Vectorised passes over one row [V] of logits, or over one block of it. They are compiled once per instruction set and
// selected at load. l is a logit; weights are those of DistributionRow.
#pragma once
#include <cstdint>

#include "random.h"
#include "scalar.h"

namespace specdec {

// weight(v) = exp(l * inv_t - lse) if l > cut or (l == cut and v <= tie_id) else 0
template <class Real>
struct DistributionRow {
  Real inv_t, lse, cut;
  int32_t tie_id;
  bool keeps(Real logit, int64_t id) const { return logit > cut || (logit == cut && id <= tie_id); }
  bool operator==(const DistributionRow&) const = default;
};

// Largest element, its lowest id, and whether the row has a NaN. -inf and id 0 for a row of -inf.
template <class Real>
struct Peak {
  Real logit;
  int32_t id;
  bool nan;
};

// A running argmax. Only a strictly larger score replaces it, so equal scores keep the lower id if ids ascend.
template <class Real>
struct Best {
  Real score;
  int32_t id;
};

template <class Real>
struct Entry {
  Real logit;
  int32_t id;
};

// Buffers of one block are zero padded to a multiple of this.
constexpr int kPad = 32;
constexpr int kEdges = 8;  // thresholds per pass of `above`
constexpr int kTops = 32;  // groups of `tops`
constexpr double kRough = 1.0615;  // largest (1 + f) / 2^f for 0 <= f <= 1

// Functions that accumulate in float. Arrays are indexed by Scalar (Float32, BFloat16, Half).
struct RowKernels {
  const char* name;
  // Sums of exp(l * inv_t) over each block, sums [block_count(V)], in units of exp(result). NaN for a block with a NaN
  // or +inf element, 0 for a block of -inf.
  double (*masses[3])(const void* row, int64_t count, float inv_t, double* sums);
  // An upper bound of the sum of exp((l - top) * inv_t), at most kRough times too large, up to 2e-4 of it. Stops early
  // with a value above `enough`. NaN if there is no bound, for example with a NaN or +inf element.
  double (*rough_total[3])(const void* row, int64_t count, float inv_t, float top, double enough);
  // The same for every block, sums [block_count(V)], in units of exp(*top * inv_t) for a logit *top that it selects.
  // Returns the total.
  double (*rough_masses[3])(const void* row, int64_t count, float inv_t, double* sums, float* top);
  // The largest element and its id.
  Peak<float> (*peak[3])(const void* row, int64_t count);
  // The largest element that is not NaN; -inf if there is none.
  float (*largest[3])(const void* row, int64_t count);
  // An upper bound of the total of `weights` (up to rounding), from comparisons only.
  float (*mass_bound[3])(const void* piece, int count, const DistributionRow<float>& dist);
  // Total of max(share * p - q, 0) for two pieces of the same type and the same tokens; an upper bound if a distribution
  // has a cut.
  float (*residual_mass[3])(const void* p, const void* q, int count, const DistributionRow<float>& p_dist,
                            const DistributionRow<float>& q_dist, float share);
  // Sum of exp(double(l * inv_t) - top) over the elements > floor, for an exact nucleus.
  double (*mass64[3])(const void* row, int64_t count, float inv_t, double top, float floor);
  // The number of elements > each of kEdges thresholds, and the approximate sum of exp((l - top) * inv_t) over them unless
  // masses is null. All arrays are [kEdges].
  void (*above[3])(const void* row, int64_t count, float inv_t, float top, const float* edges, double* masses,
                   int64_t* counts);
  // The elements in [low, high] in id order. Returns their number, or stops with more than `limit`. Writes up to
  // kCollectSlack entries past the limit.
  int64_t (*collect[3])(const void* row, int64_t count, float low, float high, int64_t limit, Entry<float>* out);
  // Weights of tokens first .. first + count - 1 (count <= kVocabBlock), zero padded.
  void (*weights[3])(const void* piece, int count, int32_t first, const DistributionRow<float>& dist, float* out);
  // argmax of l * inv_t + gumbel over the kept tokens first .. first + count - 1; first is a multiple of four.
  void (*replay[3])(const void* piece, int count, int32_t first, const DistributionRow<float>& dist, const Counter& counter,
                    Best<float>* best);
  // p = max(p - q, 0), for one block.
  void (*subtract)(float* p, const float* q, int count);
  // Sum of a block's weights.
  double (*total)(const float* weights, int count);
  // argmax of log(weight) + gumbel over the tokens first .. first + count - 1; first is a multiple of four.
  void (*gumbel_max)(const float* weights, int count, int32_t first, const Counter& counter, Best<float>* best);
  // l * inv_t, plus noise [V] unless it is null; -inf replaces NaN. Unless null, tops [kTops] receives the largest result
  // of each group, where the groups partition the tokens.
  void (*scaled_logits[3])(const void* row, int64_t count, float inv_t, const float* noise, float* out, float* tops);
  // Gumbel noise of tokens 0 .. count - 1.
  void (*gumbel_row)(const Counter& counter, int64_t count, float* out);
};

const RowKernels& row_kernels();

extern const RowKernels kPortableRows;
#if defined(__x86_64__) && defined(__GNUC__)
#define SPECDEC_X86 1
extern const RowKernels kAvx2Rows, kAvx512Rows;
#endif

// Overloads for both accumulation types: float uses the table, double plain loops (rows_double.cpp).
namespace rows {
constexpr int kCollectSlack = 16;
inline int slot(Scalar type) { return static_cast<int>(type); }
inline double masses(Scalar type, const void* row, int64_t count, float inv_t, double* sums) {
  return row_kernels().masses[slot(type)](row, count, inv_t, sums);
}
inline double rough_total(Scalar type, const void* row, int64_t count, float inv_t, float top, double enough) {
  return row_kernels().rough_total[slot(type)](row, count, inv_t, top, enough);
}
inline double rough_masses(Scalar type, const void* row, int64_t count, float inv_t, double* sums, float* top) {
  return row_kernels().rough_masses[slot(type)](row, count, inv_t, sums, top);
}
inline Peak<float> peak(Scalar type, const void* row, int64_t count, float) {
  return row_kernels().peak[slot(type)](row, count);
}
inline float largest(Scalar type, const void* row, int64_t count, float) {
  return row_kernels().largest[slot(type)](row, count);
}
inline float mass_bound(Scalar type, const void* piece, int count, const DistributionRow<float>& dist) {
  return row_kernels().mass_bound[slot(type)](piece, count, dist);
}
inline float residual_mass(Scalar type, const void* p, const void* q, int count, const DistributionRow<float>& p_dist,
                           const DistributionRow<float>& q_dist, float share) {
  return row_kernels().residual_mass[slot(type)](p, q, count, p_dist, q_dist, share);
}
inline double mass64(Scalar type, const void* row, int64_t count, float inv_t, double top, float floor) {
  return row_kernels().mass64[slot(type)](row, count, inv_t, top, floor);
}
inline void above(Scalar type, const void* row, int64_t count, float inv_t, float top, const float* edges,
                  double* masses, int64_t* counts) {
  row_kernels().above[slot(type)](row, count, inv_t, top, edges, masses, counts);
}
inline int64_t collect(Scalar type, const void* row, int64_t count, float low, float high, int64_t limit,
                       Entry<float>* out) {
  return row_kernels().collect[slot(type)](row, count, low, high, limit, out);
}
inline void weights(Scalar type, const void* piece, int count, int32_t first, const DistributionRow<float>& dist, float* out) {
  row_kernels().weights[slot(type)](piece, count, first, dist, out);
}
inline void replay(Scalar type, const void* piece, int count, int32_t first, const DistributionRow<float>& dist,
                   const Counter& counter, Best<float>* best) {
  row_kernels().replay[slot(type)](piece, count, first, dist, counter, best);
}
inline void scaled_logits(Scalar type, const void* row, int64_t count, float inv_t, const float* noise, float* out,
                   float* tops = nullptr) {
  row_kernels().scaled_logits[slot(type)](row, count, inv_t, noise, out, tops);
}
inline void subtract(float* p, const float* q, int count) { row_kernels().subtract(p, q, count); }
inline double total(const float* weights, int count) { return row_kernels().total(weights, count); }
inline void gumbel_max(const float* weights, int count, int32_t first, const Counter& counter, Best<float>* best) {
  row_kernels().gumbel_max(weights, count, first, counter, best);
}
inline float log(float weight) { return noise::log(weight); }

double masses(Scalar, const void* row, int64_t count, double inv_t, double* sums);
Peak<double> peak(Scalar, const void* row, int64_t count, double);
double largest(Scalar, const void* row, int64_t count, double);
double mass_bound(Scalar, const void* piece, int count, const DistributionRow<double>& dist);
double mass64(Scalar, const void* row, int64_t count, double inv_t, double top, double floor);
void above(Scalar, const void* row, int64_t count, double inv_t, double top, const double* edges, double* masses,
           int64_t* counts);
int64_t collect(Scalar, const void* row, int64_t count, double low, double high, int64_t limit, Entry<double>* out);
void weights(Scalar, const void* piece, int count, int32_t first, const DistributionRow<double>& dist, double* out);
void replay(Scalar, const void* piece, int count, int32_t first, const DistributionRow<double>& dist, const Counter& counter,
            Best<double>* best);
void scaled_logits(Scalar, const void* row, int64_t count, double inv_t, const float* noise, double* out, double* tops = nullptr);
void subtract(double* p, const double* q, int count);
double total(const double* weights, int count);
void gumbel_max(const double* weights, int count, int32_t first, const Counter& counter, Best<double>* best);
double log(double weight);
}  // namespace rows

}  // namespace specdec

// Rough totals of exponentials over a row [V]: upper bounds at the speed of a read, for AVX-512 and AVX2. Only rows_body.h
// includes it, after row_masses.h.

namespace specdec {
namespace SPECDEC_ISA {

#if SPECDEC_LANES >= 8

// 2^x <= (1 + f) * 2^n for x = n + f: the float whose bits are (x + 127) * 2^23. Adding 2 rounds x to multiples of 2^-14 and
// puts its bits at the end of a word; a shift moves them into place. This runs as fast as a row is read, even from memory,
// without prefetching. A square term that corrects 1 + f would cost AVX-512 more than the recomputed rows it saves.
// Returns NaN if some x is outside [-kDeepest, 85). With kClamped, smaller x (and -inf) count as -kDeepest.
template <bool kClamped, class In>
SPECDEC_INLINE double rough_sum(const In* p, int64_t count, F scale, F shift, double enough) {
  constexpr int kPart = 64 * kStep;  // a float can add this many terms without losing precision
  auto word = [&](F logit, bool clamped) __attribute__((always_inline)) {
    const F sum = fma(logit, scale, shift);
    return bits<U>(clamped ? larger(all(2 + 0x1p-8f), sum) : sum);  // n = 1: no denormal numbers
  };
  double total = 0;
  for (int64_t i = 0; i < count && !(total > enough);) {
    F sum[4] = {};
    U seen = {};
    const int64_t part = i + kPart < count ? i + kPart : count;
    for (; i + kStep <= part; i += kStep) {
      F logit[4];
      U words[4];
      load_two(p + i, logit, logit + 1);
      load_two(p + i + 2 * N, logit + 2, logit + 3);
      for (int k = 0; k < 4; ++k) {
        words[k] = word(logit[k], kClamped);
        sum[k] += bits<F>(words[k] << 9);
      }
      seen = any_of(any_of(seen, words[0], words[1]), words[2], words[3]);
    }
    if (part == count)
      for (; i < count; i += N) {
        const U last = word(load(p + i, count - i), true);  // lanes past the end are -inf
        seen |= last;
        sum[0] += bits<F>(last << 9);
      }
    const double more = reduce_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (!(more < kInfinity) || !none_in(seen, ~(0x40000000u | ((1u << 22) - 1)))) return std::nan("");
    total += 0x1p-43 * more;
  }
  return total;
}

// Arguments of rough_sum for a row in units of exp(top * inv_t). Not `usable` if floats cannot distinguish the powers.
struct RoughScale {
  F scale, shift;
  bool usable;
};
SPECDEC_INLINE RoughScale rough_scale(float inv_t, float top) {
  const double exact = inv_t * kLog2E, power = top * exact;
  const float shift = static_cast<float>(2 + (kDeepest - power) * 0x1p-8);
  return {all(static_cast<float>(exact * 0x1p-8)), all(shift), std::fabs(power) < 1500 && exact < 0x1p60};
}

template <class In>
double rough_total(const void* row, int64_t count, float inv_t, float top, double enough) {
  const In* p = static_cast<const In*>(row);
  const RoughScale own = rough_scale(inv_t, top);
  if (!own.usable) return std::nan("");
  const double sum = rough_sum<false>(p, count, own.scale, own.shift, enough);
  return std::isnan(sum) ? rough_sum<true>(p, count, own.scale, own.shift, enough) : sum;
}

template <bool kClamped, class In>
SPECDEC_INLINE double rough_sums(const In* p, int64_t count, const RoughScale& own, double* sums) {
  double total = 0;
  for (int64_t first = 0; first < count; first += kVocabBlock) {
    const int64_t size = count - first < kVocabBlock ? count - first : kVocabBlock;
    const double sum = rough_sum<kClamped>(p + first, size, own.scale, own.shift, kInfinity);
    if (std::isnan(sum)) return sum;
    total += sums[first / kVocabBlock] = sum;
  }
  return total;
}

template <class In>
double rough_masses(const void* row, int64_t count, float inv_t, double* sums, float* top) {
  const In* p = static_cast<const In*>(row);
  *top = largest_of(p, count < kSample ? count : kSample);
  const RoughScale own = rough_scale(inv_t, *top);
  if (!own.usable) return std::nan("");
  const double total = rough_sums<false>(p, count, own, sums);
  return std::isnan(total) ? rough_sums<true>(p, count, own, sums) : total;
}

#else

template <class In>
double rough_total(const void*, int64_t, float, float, double) {
  return std::nan("");
}
template <class In>
double rough_masses(const void*, int64_t, float, double*, float*) {
  return std::nan("");
}

#endif

}  // namespace SPECDEC_ISA
}  // namespace specdec

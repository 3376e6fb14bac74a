// Block masses: sums of exponentials over the blocks of a row [V]. Only rows_body.h includes it.
//
// The quick path, for AVX-512 (about two and a half cycles per vector) and AVX2. Let x = l * scale - power in [-170, 86).
// Then 2^x = 2^n * 2^(j / E) * 2^r with |r| <= 1 / 2E, where the table has E = 32 entries, or 8 for AVX2. Adding 2 to
// x * kFine rounds it to multiples of 2^-22 and puts n and j into the low bits. One table look-up, a shift and an addition
// then give 2^n * 2^(j / E). 2^r is approximated by kSquare * ((r + kMiddle)^2 + kRest) with an error of at most 1.3e-7 for
// 32 entries, and by kCube * (r + kRoot) * ((r + kMiddle)^2 + kRest) with 4e-8 for 8. Any x out of range, including -inf
// and NaN, sets a higher bit.
#include <cmath>

namespace specdec {
namespace SPECDEC_ISA {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Larger block sums need another unit, because the first-order correction of the scale holds only near the unit.
constexpr double kMost = 0x1p24;
// Below it, floats distinguish neighbouring powers.
constexpr float kFar = 60000;

constexpr int64_t kSample = 128;  // elements that determine the initial unit

template <class In>
SPECDEC_INLINE float largest_of(const In* p, int64_t count) {
  F best[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  int64_t i = 0;
  for (; i + 4 * N <= count; i += 4 * N)
    for (int k = 0; k < 4; ++k) best[k] = larger(widen_lanes(p + i + k * N), best[k]);
  for (; i < count; i += N) best[0] = larger(load(p + i, count - i), best[0]);
  return reduce_max(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

#if SPECDEC_LANES >= 8

struct QuickScale {
  F scale, start, middle;
  float plain_scale, power;
  bool usable;
};

constexpr int kDeepest = 170;
#if SPECDEC_LANES == 16
constexpr int kEntryBits = 5;
constexpr float kMiddle = 46.0f / 32;  // a multiple of 1 / E, so r + kMiddle is exact
constexpr double kSquare = 0.24109942, kRest = 2.0812600274143485, kFactor = kSquare;
#else
constexpr int kEntryBits = 3;
constexpr float kMiddle = 1;
constexpr double kCube = 0.05600285753388301, kRest = 6.796250861820816, kFactor = kCube;
constexpr float kRootBeyond = 1.2903612852096558f;  // kRoot - kMiddle
#endif
constexpr float kFine = 0x1p-22f * (1 << kEntryBits);
alignas(64) constexpr uint32_t kPowers[1 << kEntryBits] = {  // mantissa of 2^(j / E) minus j << (23 - kEntryBits)
#if SPECDEC_LANES == 16
    0x00000000u, 0xfffecd87u, 0xfffdaac3u, 0xfffc980fu, 0xfffb95c2u, 0xfffaa43au, 0xfff9c3d3u, 0xfff8f4f0u,
    0xfff837f0u, 0xfff78d3au, 0xfff6f532u, 0xfff67043u, 0xfff5fed7u, 0xfff5a15bu, 0xfff5583fu, 0xfff523f6u,
    0xfff504f3u, 0xfff4fbafu, 0xfff508a4u, 0xfff52c4du, 0xfff5672au, 0xfff5b9beu, 0xfff6248cu, 0xfff6a81eu,
    0xfff744fdu, 0xfff7fbb8u, 0xfff8ccdfu, 0xfff9b907u, 0xfffac0c7u, 0xfffbe4bau, 0xfffd257du, 0xfffe83b3u,
#else
    0x00000000u, 0xfffb95c2u, 0xfff837f0u, 0xfff5fed7u, 0xfff504f3u, 0xfff5672au, 0xfff744fdu, 0xfffac0c7u,
#endif
};

SPECDEC_INLINE QuickScale quick_scale(float scale, double power) {
  const float start = 2.0f + (static_cast<float>(kDeepest) - static_cast<float>(power)) * kFine;
  return {all(scale * kFine), all(start), all(start + kMiddle * kFine), scale, static_cast<float>(power),
          std::fabs(power) < kFar && scale > 0x1p-60f && scale < 0x1p60f};
}

// Two vectors of a block. Their element order does not matter to a sum.
SPECDEC_INLINE void load_two(const float* p, F* a, F* b) {
  *a = widen_lanes(p);
  *b = widen_lanes(p + N);
}
SPECDEC_INLINE void load_two(const Half* p, F* a, F* b) {
  *a = widen_lanes(p);
  *b = widen_lanes(p + N);
}
SPECDEC_INLINE void load_two(const BFloat16* p, F* a, F* b) {
  U both;
  std::memcpy(&both, p, sizeof both);
  *a = bits<F>(both << 16);
  *b = bits<F>(both & 0xffff0000u);
}

#if SPECDEC_LANES == 16
struct Powers {
  __m512i low, high;
};
SPECDEC_INLINE Powers powers() { return {_mm512_load_si512(kPowers), _mm512_load_si512(kPowers + 16)}; }
SPECDEC_INLINE U power_of(const Powers& table, U word) {
  return (U)_mm512_permutex2var_epi32(table.low, (__m512i)word, table.high) + (word << (23 - kEntryBits));
}
SPECDEC_INLINE F minus(F a, F b, F c) { return (F)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }  // a * b - c
SPECDEC_INLINE U any_of(U a, U b, U c) { return (U)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xFE); }
SPECDEC_INLINE bool none_in(U word, uint32_t mask) {
  return _mm512_test_epi32_mask((__m512i)word, _mm512_set1_epi32(static_cast<int>(mask))) == 0;
}
// total + 2^r * power in its own unit; r is passed as (r + kMiddle) * kFine
SPECDEC_INLINE F add_near(F r, F power, F rest, F total) { return fma(power, fma(r, r, rest), total); }
#else
struct Powers {
  __m256i entries;
};
SPECDEC_INLINE Powers powers() { return {_mm256_load_si256(reinterpret_cast<const __m256i*>(kPowers))}; }
SPECDEC_INLINE U power_of(const Powers& table, U word) {
  return (U)_mm256_permutevar8x32_epi32(table.entries, (__m256i)word) + (word << (23 - kEntryBits));
}
SPECDEC_INLINE F minus(F a, F b, F c) { return (F)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }  // a * b - c
SPECDEC_INLINE U any_of(U a, U b, U c) { return a | b | c; }
SPECDEC_INLINE bool none_in(U word, uint32_t mask) { return _mm256_testz_si256((__m256i)word, (__m256i)all(mask)); }
SPECDEC_INLINE F add_near(F r, F power, F rest, F total) {
  return fma(power * fma(r, all(1 / kFine), all(kRootBeyond)), fma(r, r, rest), total);
}
#endif

// total += 2^(l * scale - power) in its own unit. Returns the word for the range check.
SPECDEC_INLINE U quick_add(F logit, const QuickScale& quick, const Powers& table, F rest, F* total) {
  const F q = fma(logit, quick.scale, quick.start);
  const F r = minus(logit, quick.scale, q - quick.middle);
  const U word = bits<U>(q);
  *total = add_near(r, bits<F>(power_of(table, word)), rest, *total);
  return word;
}

// Adds a block of whole steps. Returns the union of the words' bits.
constexpr int kStep = 4 * N;
template <class In>
SPECDEC_INLINE U quick_block(const In* p, int count, const QuickScale& quick, U seen, F* total) {
  const F rest = all(static_cast<float>(kRest) * (kFine * kFine));
  const Powers table = powers();
  F first = {}, second = {};
  for (const In* const end = p + count; p != end; p += kStep) {
    F a, b, c, d;
    for (const In* line = p; line != p + kStep; line += 64 / sizeof(In)) fetch_ahead(line);
    load_two(p, &a, &b);
    load_two(p + 2 * N, &c, &d);
    const U w0 = quick_add(a, quick, table, rest, &first), w1 = quick_add(b, quick, table, rest, &second);
    seen = any_of(seen, w0, w1);
    const U w2 = quick_add(c, quick, table, rest, &first), w3 = quick_add(d, quick, table, rest, &second);
    seen = any_of(seen, w2, w3);
  }
  *total = first + second;
  return seen;
}
// A word in range has the bits of 2.0 and, below them, n and j.
SPECDEC_INLINE bool quick_range(U seen) { return none_in(seen, ~(0x40000000u | ((256u << kEntryBits) - 1))); }
// A power of 2^-127 stands for n = 0, and x = 0 is n = kDeepest.
constexpr double kQuickUnit = kFactor / (double(kFine) * double(kFine)) / 0x1p43;
static_assert(kDeepest == 127 + 43);

// Sum of 2^(l * scale - power), or false if some element is out of range.
template <class In>
SPECDEC_INLINE bool quick_sum(const In* p, int count, const QuickScale& quick, double* sum) {
  if (!quick.usable) return false;
  const int whole = count / kStep * kStep;
  F total;
  if (!quick_range(quick_block(p, whole, quick, U{}, &total))) return false;
  F few = {};
  for (int i = whole; i < count; i += N)
    few = add_exp2(fma(load(p + i, count - i), all(quick.plain_scale), all(-quick.power)), few);
  *sum = reduce_sum(total) * kQuickUnit + reduce_sum(few);
  return *sum < kMost;
}

// Lane i of the result is the sum of v[i].
#if SPECDEC_LANES == 16
SPECDEC_INLINE F sum_each(const F (&v)[16]) {
  __m512 quarter[4];
  for (int i = 0; i < 4; ++i) {
    __m512 half[2];
    for (int k = 0; k < 2; ++k) {
      const __m512 a = (__m512)v[4 * i + 2 * k], b = (__m512)v[4 * i + 2 * k + 1];
      half[k] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    }
    const __m512d a = _mm512_castps_pd(half[0]), b = _mm512_castps_pd(half[1]);
    quarter[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  __m512 half[2];
  for (int k = 0; k < 2; ++k)
    half[k] = _mm512_shuffle_f32x4(quarter[2 * k], quarter[2 * k + 1], 0x88) +
              _mm512_shuffle_f32x4(quarter[2 * k], quarter[2 * k + 1], 0xdd);
  return (F)(_mm512_shuffle_f32x4(half[0], half[1], 0x88) + _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
}
#else
SPECDEC_INLINE F sum_each(const F (&v)[8]) {
  __m256 half[2];
  for (int k = 0; k < 2; ++k)
    half[k] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4 * k], (__m256)v[4 * k + 1]),
                             _mm256_hadd_ps((__m256)v[4 * k + 2], (__m256)v[4 * k + 3]));
  return (F)(_mm256_permute2f128_ps(half[0], half[1], 0x20) + _mm256_permute2f128_ps(half[0], half[1], 0x31));
}
#endif

// Sums of `blocks` <= kGroup whole blocks, or false if one of them is out of range.
constexpr int kGroup = N;
template <class In>
SPECDEC_INLINE bool quick_sums(const In* p, int blocks, const QuickScale& quick, double* sums) {
  if (!quick.usable) return false;
  F total[kGroup] = {};
  U seen = {};
  for (int b = 0; b < blocks; ++b) seen = quick_block(p + b * kVocabBlock, kVocabBlock, quick, seen, total + b);
  const F sum = sum_each(total);
  if (!quick_range(seen) || any(~(sum * static_cast<float>(kQuickUnit) < static_cast<float>(kMost)))) return false;
  for (int b = 0; b < blocks; ++b) sums[b] = sum[b] * kQuickUnit;
  return true;
}

#else

struct QuickScale {};
SPECDEC_INLINE QuickScale quick_scale(float, double) { return {}; }
template <class In>
SPECDEC_INLINE bool quick_sum(const In*, int, const QuickScale&, double*) {
  return false;
}
constexpr int kGroup = 16;
template <class In>
SPECDEC_INLINE bool quick_sums(const In*, int, const QuickScale&, double*) {
  return false;
}

#endif

// Sum of 2^(l * scale + shift).
template <class In>
SPECDEC_INLINE double slice_sum(const In* p, int64_t count, float scale, float shift) {
  F sum[4] = {F{}, F{}, F{}, F{}};
  const F a = all(scale), b = all(shift);
  int64_t i = 0;
  for (; i + 4 * N <= count; i += 4 * N)
    for (int k = 0; k < 4; ++k) {
      fetch_ahead(p + i + k * N);
      sum[k] = add_exp2(fma(widen_lanes(p + i + k * N), a, b), sum[k]);
    }
  for (; i < count; i += N) sum[0] = add_exp2(fma(load(p + i, count - i), a, b), sum[0]);
  return reduce_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// log2 of a block's sum, for logits near the end of float's range and for blocks without finite logits.
template <class In>
__attribute__((noinline, cold)) double careful_sum(const In* p, int64_t count, double exact, float top) {
  double total = 0;
  if (!(top > -kInfinity && top < kInfinity)) {  // -inf for a block of -inf, NaN if it has +inf or NaN
    for (int64_t i = 0; i < count; ++i) total += widen(p[i]) == -kInfinity ? 0.0 : std::nan("");
    return std::log2(total);
  }
  for (int64_t i = 0; i < count; ++i) total += std::exp2((double(widen(p[i])) - top) * exact);
  return top * exact + std::log2(total);
}

// The same for a block whose elements exceed the range of the row's unit.
template <class In>
__attribute__((noinline)) double lone_sum(const In* p, int64_t count, double exact) {
  const float scale = static_cast<float>(exact), top = largest_of(p, count);
  if (!(std::fabs(top) * scale < kFar)) return careful_sum(p, count, exact, top);
  // `scale` and `shift` are rounded. The shift is corrected exactly, the scale to first order.
  return static_cast<double>(top * scale) + (exact - scale) * top + std::log2(slice_sum(p, count, scale, -top * scale));
}

// The unit 2^power of a row's sums. Elements near it contribute most, so the rounding of `scale` is corrected there.
struct Unit {
  float scale;
  double power, exponent;
  bool far;  // out of float range
  SPECDEC_INLINE_MEMBER void move(double log2_logit, double exact) {
    power = log2_logit > -kInfinity && log2_logit < kInfinity ? log2_logit : 0.0;
    scale = static_cast<float>(exact);
    far = !(__builtin_fabs(power) < kFar);
    if (!far) power = __builtin_rint(power);
    exponent = far ? power : power + (exact - scale) * (power / scale);
  }
};

// The block sums of a row, computed in order.
template <class In>
struct Masses {
  const In* row;
  int64_t count;
  double exact;
  double* sums;
  Unit unit;
  QuickScale quick;
  // After a block out of range (of forbidden tokens, for example) the next few blocks skip the quick path.
  int patience = 0, wait = 0;

  SPECDEC_INLINE_MEMBER void move(double log2_logit) {
    unit.move(log2_logit, exact);
    quick = quick_scale(unit.scale, unit.power);
    patience = wait = 0;
  }
  int64_t blocks() const { return (count + kVocabBlock - 1) / kVocabBlock; }

  // Adds one block. The unit changes if the block is much larger than the earlier ones.
  __attribute__((noinline)) void add(int64_t b) {
    const In* p = row + b * kVocabBlock;
    const int size = static_cast<int>(count - b * kVocabBlock < kVocabBlock ? count - b * kVocabBlock : kVocabBlock);
    if (wait > 0) {
      --wait;
    } else if (quick_sum(p, size, quick, sums + b)) {
      patience = 0;
      return;
    } else {
      wait = patience = patience < kGroup ? 2 * patience + 1 : patience;
    }
    double sum = unit.far ? kInfinity : slice_sum(p, size, unit.scale, static_cast<float>(-unit.power));
    if (!(sum < kMost)) {
      const double log2_sum = lone_sum(p, size, exact);
      if (log2_sum - unit.exponent > 12) {
        const double before = unit.exponent;
        move(log2_sum);
        for (int64_t i = 0; i < b; ++i) sums[i] *= std::exp2(before - unit.exponent);
      }
      sum = std::exp2(log2_sum - unit.exponent);
    }
    sums[b] = sum;
  }
};

template <class In>
double masses(const void* row, int64_t count, float inv_t, double* sums) {
  Masses<In> own{static_cast<const In*>(row), count, inv_t * kLog2E, sums, {}, {}};
  float logit = largest_of(own.row, count < kSample ? count : kSample);
  if (logit == -kInfinity) logit = largest_of(own.row, count);
  own.move(logit * own.exact);
  const int64_t whole = count / kVocabBlock, blocks = own.blocks();
  for (int64_t b = 0; b < blocks;) {
    const int group = static_cast<int>(whole - b < kGroup ? whole - b : kGroup);
    if (group > 0 && own.wait == 0 && quick_sums(own.row + b * kVocabBlock, group, own.quick, sums + b)) {
      b += group;
      continue;
    }
    for (const int64_t end = group > 0 ? b + group : blocks; b < end; ++b) own.add(b);
  }
  return logit == -kInfinity ? -kInfinity : own.unit.exponent * kLn2;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec

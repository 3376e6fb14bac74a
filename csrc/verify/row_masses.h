// Sums of exponentials over the race blocks of a row. Included by rows_body.h, never alone.
//
// The quick way, for AVX-512, takes about two and a half cycles per vector. With x = l * scale - power in [-170, 86), 2^x = 2^n * 2^(j / 32) * 2^r, |r| <= 1/64. Adding 2 to x * 2^-17 rounds it to
// multiples of 2^-22 and leaves n and j in the low 13 bits, so one table look-up, a shift and an addition make 2^n *
// 2^(j / 32), and 2^r is close to kSquare * ((r + kMiddle)^2 + kRest), 1.3e-7 at worst. Anything else of that range, -inf
// and NaN included, sets a higher bit.
#include <cmath>

namespace specdec {
namespace SPECDEC_ISA {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Block sums that are larger call for another unit: the first-order correction of the scale holds near the unit only.
constexpr double kMost = 0x1p24;
// Floats tell neighbouring powers apart below it.
constexpr float kFar = 60000;

template <class In>
SPECDEC_INLINE float largest_of(const In* p, int64_t count) {
  F best[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  int64_t i = 0;
  for (; i + 4 * N <= count; i += 4 * N)
    for (int k = 0; k < 4; ++k) best[k] = larger(widen_lanes(p + i + k * N), best[k]);
  for (; i < count; i += N) best[0] = larger(load(p + i, count - i), best[0]);
  return reduce_max(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

#if SPECDEC_LANES == 16

struct QuickScale {
  F scale, start, middle;
  float plain_scale, power;
  bool usable;
};

constexpr float kFine = 0x1p-17f, kMiddle = 46.0f / 32;  // kMiddle is a multiple of 1/32, so that r + kMiddle is exact
constexpr double kSquare = 0.24109942, kRest = 2.0812600274143485;
constexpr int kDeepest = 170;
alignas(64) constexpr uint32_t kPowers[32] = {  // mantissa of 2^(j / 32) minus j << 18
    0x00000000u, 0xfffecd87u, 0xfffdaac3u, 0xfffc980fu, 0xfffb95c2u, 0xfffaa43au, 0xfff9c3d3u, 0xfff8f4f0u,
    0xfff837f0u, 0xfff78d3au, 0xfff6f532u, 0xfff67043u, 0xfff5fed7u, 0xfff5a15bu, 0xfff5583fu, 0xfff523f6u,
    0xfff504f3u, 0xfff4fbafu, 0xfff508a4u, 0xfff52c4du, 0xfff5672au, 0xfff5b9beu, 0xfff6248cu, 0xfff6a81eu,
    0xfff744fdu, 0xfff7fbb8u, 0xfff8ccdfu, 0xfff9b907u, 0xfffac0c7u, 0xfffbe4bau, 0xfffd257du, 0xfffe83b3u,
};

SPECDEC_INLINE QuickScale quick_scale(float scale, double power) {
  const float start = 2.0f + (static_cast<float>(kDeepest) - static_cast<float>(power)) * kFine;
  return {all(scale * kFine), all(start), all(start + kMiddle * kFine), scale, static_cast<float>(power),
          std::fabs(power) < kFar && scale > 0x1p-60f && scale < 0x1p60f};
}

// Two vectors of a block; which elements go to which does not matter to a sum.
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

// total += 2^(l * scale - power) in its own unit; returns the word that tells the range.
SPECDEC_INLINE __m512i quick_add(F level, const QuickScale& quick, __m512i low, __m512i high, F rest, F* total) {
  const F q = fma(level, quick.scale, quick.start);
  const F r = (F)_mm512_fmsub_ps((__m512)level, (__m512)quick.scale, (__m512)(q - quick.middle));  // (r + kMiddle) kFine
  const __m512i word = (__m512i)q;
  const __m512i table = _mm512_permutex2var_epi32(low, word, high);
  const F power = (F)_mm512_add_epi32(table, _mm512_slli_epi32(word, 18));
  *total = fma(power, fma(r, r, rest), *total);
  return word;
}

// Adds a block of whole steps; returns the words' bits.
constexpr int kStep = 4 * N;
template <class In>
SPECDEC_INLINE __m512i quick_block(const In* p, int count, const QuickScale& quick, __m512i seen, F* total) {
  const F rest = all(static_cast<float>(kRest) * (kFine * kFine));
  const __m512i low = _mm512_load_si512(kPowers), high = _mm512_load_si512(kPowers + 16);
  F first = {}, second = {};
  for (const In* const end = p + count; p != end; p += kStep) {
    F a, b, c, d;
    for (const In* line = p; line != p + kStep; line += 64 / sizeof(In)) fetch_ahead(line);
    load_two(p, &a, &b);
    load_two(p + 2 * N, &c, &d);
    const __m512i w0 = quick_add(a, quick, low, high, rest, &first), w1 = quick_add(b, quick, low, high, rest, &second);
    seen = _mm512_ternarylogic_epi32(seen, w0, w1, 0xFE);  // or
    const __m512i w2 = quick_add(c, quick, low, high, rest, &first), w3 = quick_add(d, quick, low, high, rest, &second);
    seen = _mm512_ternarylogic_epi32(seen, w2, w3, 0xFE);
  }
  *total = first + second;
  return seen;
}
SPECDEC_INLINE bool quick_range(__m512i seen) {
  return _mm512_test_epi32_mask(seen, _mm512_set1_epi32(static_cast<int>(0xbfffe000u))) == 0;
}
// A power of 2^-127 stands for n = 0, and x = 0 is n = kDeepest.
constexpr double kQuickUnit = kSquare * 0x1p34 / 0x1p43;
static_assert(kDeepest == 127 + 43);

// Sum of 2^(l * scale - power), or false if some element is out of range.
template <class In>
SPECDEC_INLINE bool quick_sum(const In* p, int count, const QuickScale& quick, double* sum) {
  if (!quick.usable) return false;
  const int whole = count / kStep * kStep;
  F total;
  if (!quick_range(quick_block(p, whole, quick, _mm512_setzero_si512(), &total))) return false;
  F few = {};
  for (int i = whole; i < count; i += N)
    few = add_exp2(fma(load(p + i, count - i), all(quick.plain_scale), all(-quick.power)), few);
  *sum = reduce_sum(total) * kQuickUnit + reduce_sum(few);
  return *sum < kMost;
}

// Lane i of the answer is the sum of v[i].
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

// Sums of `blocks` <= kGroup whole blocks, or false if one of them is not for the quick way.
constexpr int kGroup = 16;
template <class In>
SPECDEC_INLINE bool quick_sums(const In* p, int blocks, const QuickScale& quick, double* sums) {
  if (!quick.usable) return false;
  F total[kGroup] = {};
  __m512i seen = _mm512_setzero_si512();
  for (int b = 0; b < blocks; ++b) seen = quick_block(p + b * kRaceBlock, kRaceBlock, quick, seen, total + b);
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

// log2 of a block's sum, for levels near the end of float's range and for blocks without a finite one.
template <class In>
__attribute__((noinline, cold)) double careful_sum(const In* p, int64_t count, double exact, float top) {
  double total = 0;
  if (!(top > -kInfinity && top < kInfinity)) {  // -inf for a block of -inf, NaN if there is +inf or NaN
    for (int64_t i = 0; i < count; ++i) total += widen(p[i]) == -kInfinity ? 0.0 : std::nan("");
    return std::log2(total);
  }
  for (int64_t i = 0; i < count; ++i) total += std::exp2((double(widen(p[i])) - top) * exact);
  return top * exact + std::log2(total);
}

// The same for a block whose elements do not fit the row's unit.
template <class In>
__attribute__((noinline)) double lone_sum(const In* p, int64_t count, double exact) {
  const float scale = static_cast<float>(exact), top = largest_of(p, count);
  if (!(std::fabs(top) * scale < kFar)) return careful_sum(p, count, exact, top);
  // `scale` and `shift` are rounded; the shift enters exactly as it was used, the scale to first order.
  return static_cast<double>(top * scale) + (exact - scale) * top + std::log2(slice_sum(p, count, scale, -top * scale));
}

// The unit 2^power of a row's sums. The elements near it weigh most, so the rounding of `scale` is undone there.
struct Unit {
  float scale;
  double power, exponent;
  bool far;  // from what floats can take
  SPECDEC_INLINE_MEMBER void move(double log2_level, double exact) {
    power = log2_level > -kInfinity && log2_level < kInfinity ? log2_level : 0.0;
    scale = static_cast<float>(exact);
    far = !(__builtin_fabs(power) < kFar);
    if (!far) power = __builtin_rint(power);
    exponent = far ? power : power + (exact - scale) * (power / scale);
  }
};

constexpr int64_t kSample = 128;  // elements that tell the unit to begin with

// A row's sums so far.
template <class In>
struct Masses {
  const In* row;
  int64_t count;
  double exact;
  double* sums;
  Unit unit;
  QuickScale quick;
  // after a block that the quick way cannot take (of forbidden tokens, say), the next few do not try it
  int patience = 0, wait = 0;

  SPECDEC_INLINE_MEMBER void move(double log2_level) {
    unit.move(log2_level, exact);
    quick = quick_scale(unit.scale, unit.power);
    patience = wait = 0;
  }
  int64_t blocks() const { return (count + kRaceBlock - 1) / kRaceBlock; }

  // One block; the unit moves if it is much larger than what came before.
  __attribute__((noinline)) void add(int64_t b) {
    const In* p = row + b * kRaceBlock;
    const int size = static_cast<int>(count - b * kRaceBlock < kRaceBlock ? count - b * kRaceBlock : kRaceBlock);
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
  float level = largest_of(own.row, count < kSample ? count : kSample);
  if (level == -kInfinity) level = largest_of(own.row, count);
  own.move(level * own.exact);
  const int64_t whole = count / kRaceBlock, blocks = own.blocks();
  for (int64_t b = 0; b < blocks;) {
    const int group = static_cast<int>(whole - b < kGroup ? whole - b : kGroup);
    if (group > 0 && own.wait == 0 && quick_sums(own.row + b * kRaceBlock, group, own.quick, sums + b)) {
      b += group;
      continue;
    }
    for (const int64_t end = group > 0 ? b + group : blocks; b < end; ++b) own.add(b);
  }
  return level == -kInfinity ? -kInfinity : own.unit.exponent * kLn2;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec

// Vectors of SPECDEC_LANES floats in namespace SPECDEC_ISA: arithmetic, loads, exponentials, Philox and noise.
// One source file per instruction set (rows_*.cpp) includes it. The arithmetic uses the vector extensions of GCC and clang,
// and intrinsics only for operations that these lack.
#include <cfloat>
#include <cstdint>
#include <cstring>

#include "random.h"
#include "scalar.h"

#define SPECDEC_INLINE static inline __attribute__((always_inline))
#define SPECDEC_INLINE_MEMBER inline __attribute__((always_inline))

namespace specdec {
namespace SPECDEC_ISA {

constexpr int N = SPECDEC_LANES;
typedef float F __attribute__((vector_size(4 * N)));
typedef int32_t I __attribute__((vector_size(4 * N)));
typedef uint32_t U __attribute__((vector_size(4 * N)));
typedef uint64_t W __attribute__((vector_size(4 * N)));  // N / 2 lanes
typedef int64_t L __attribute__((vector_size(4 * N)));
typedef double D __attribute__((vector_size(4 * N)));
typedef float HalfF __attribute__((vector_size(2 * N)));  // N / 2 lanes
typedef uint16_t Short __attribute__((vector_size(2 * N)));

template <class To, class From>
SPECDEC_INLINE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
SPECDEC_INLINE F all(float value) { return value - F{}; }
SPECDEC_INLINE U all(uint32_t value) { return value - U{}; }
SPECDEC_INLINE W all(uint64_t value) { return value - W{}; }
SPECDEC_INLINE I all(int32_t value) { return value - I{}; }
SPECDEC_INLINE D all(double value) { return value - D{}; }
SPECDEC_INLINE I iota() {
  I out;
  for (int i = 0; i < N; ++i) out[i] = i;
  return out;
}
SPECDEC_INLINE F larger(F a, F b) { return a > b ? a : b; }  // b if a is NaN
SPECDEC_INLINE U smaller(U a, U b) { return a < b ? a : b; }

// a * b + c, fused if the instruction set has it. Never used for noise.
SPECDEC_INLINE F fma(F a, F b, F c) {
#if SPECDEC_LANES == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif SPECDEC_LANES == 8
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
SPECDEC_INLINE D fma(D a, D b, D c) {
#if SPECDEC_LANES == 16
  return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif SPECDEC_LANES == 8
  return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}
// Products of the low halves of 64-bit lanes. Ignores the high halves.
SPECDEC_INLINE W multiply_low(W a, W b) {
#if SPECDEC_LANES == 16
  return (W)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif SPECDEC_LANES == 8
  return (W)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (W)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}
SPECDEC_INLINE bool any(I mask) {
#if SPECDEC_LANES == 16
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif SPECDEC_LANES == 8
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < N; ++i) found |= mask[i];
  return found != 0;
#endif
}
// From every four words: the even ones of a, then those of b; or the odd ones.
template <bool kOdd>
SPECDEC_INLINE U every_other(U a, U b) {
  [[maybe_unused]] constexpr int kOrder = kOdd ? 0xdd : 0x88;
#if SPECDEC_LANES == 16
  return (U)_mm512_shuffle_ps((__m512)a, (__m512)b, kOrder);
#elif SPECDEC_LANES == 8
  return (U)_mm256_shuffle_ps((__m256)a, (__m256)b, kOrder);
#elif defined(__SSE2__)
  return (U)_mm_shuffle_ps((__m128)a, (__m128)b, kOrder);
#else
  U out;
  for (int i = 0; i < N; ++i) out[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + i % 2 * 2 + kOdd];
  return out;
#endif
}

SPECDEC_INLINE F widen_lanes(const float* p) {
  F out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
SPECDEC_INLINE F widen_lanes(const BFloat16* p) {
  Short raw;
  std::memcpy(&raw, p, sizeof raw);
  return bits<F>(__builtin_convertvector(raw, U) << 16);
}
SPECDEC_INLINE F widen_lanes(const Half* p) {
#if SPECDEC_LANES == 16
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif SPECDEC_LANES == 8
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F out;
  for (int i = 0; i < N; ++i) out[i] = widen(p[i]);
  return out;
#endif
}
constexpr float kInfinity = __builtin_inff();
SPECDEC_INLINE float lowest_of(float) { return -kInfinity; }
SPECDEC_INLINE BFloat16 lowest_of(BFloat16) { return {0xff80u}; }
SPECDEC_INLINE Half lowest_of(Half) { return {0xfc00u}; }

// The next N elements, or `count` < N of them padded with -inf.
template <class In>
SPECDEC_INLINE F load(const In* p, int64_t count) {
  if (__builtin_expect(count >= N, 1)) return widen_lanes(p);
  In padded[N];
  for (int i = 0; i < N; ++i) padded[i] = i < count ? p[i] : lowest_of(In{});
  return widen_lanes(padded);
}
SPECDEC_INLINE void store(float* p, F value) { std::memcpy(p, &value, sizeof value); }

// Rows come from beyond the L2 cache, and hardware prefetching alone stalls the arithmetic. Harmless past the end.
constexpr int kFetchAhead = N == 16 ? 8192 : 2048;  // bytes: wider vectors consume a row faster
template <class In>
SPECDEC_INLINE void fetch_ahead(const In* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kFetchAhead);
}

// Reductions by halves.
SPECDEC_INLINE float reduce_max(F v) {
  float a[N];
  std::memcpy(a, &v, sizeof v);
  for (int half = N / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
  return a[0];
}
SPECDEC_INLINE double reduce_sum(F v) {
#if SPECDEC_LANES == 16
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float a[N];
  std::memcpy(a, &v, sizeof v);
  for (int half = N / 2; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}

// Nearest integers of |x| < 2^22 as a float; *power becomes 2^n (n from -126 to 127).
SPECDEC_INLINE F split_power(F x, F* power) {
  const F magic = all(12582912.0f);
  const F shifted = x + magic;
  *power = bits<F>((bits<I>(shifted) << 23) + 0x3f800000);
  return shifted - magic;
}
// sum + 2^x, with a relative error of 2e-7 in the new term. NaN stays NaN; -inf adds (almost) 0.
SPECDEC_INLINE F add_exp2(F x, F sum) {
#if SPECDEC_LANES == 16
  const F f = (F)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
  F poly = all(0.0018671301659196615f);
  poly = fma(poly, f, all(0.009017029777169228f));
  poly = fma(poly, f, all(0.05579991266131401f));
  poly = fma(poly, f, all(0.24016444385051727f));
  poly = fma(poly, f, all(0.6931512951850891f));
  poly = fma(poly, f, all(1.0f));
  return sum + (F)_mm512_scalef_ps((__m512)poly, (__m512)x);
#else
  F power;
  x = x < -126.0f ? all(-126.0f) : x;
  x = x > 127.0f ? all(127.0f) : x;
  const F f = x - split_power(x, &power);
  F poly = all(0.0013276466634124517f);
  poly = fma(poly, f, all(0.009675540961325169f));
  poly = fma(poly, f, all(0.05550713464617729f));
  poly = fma(poly, f, all(0.24022120237350464f));
  poly = fma(poly, f, all(0.6931469440460205f));
  poly = fma(poly, f, all(1.0000001192092896f));
  return fma(poly, power, sum);
#endif
}
// e^x to 2 ulp for x <= 88; 0 below -87.3 (results would be subnormal); NaN stays NaN.
SPECDEC_INLINE F exp(F x) {
  const I zero = x < -87.3f;
  const F clamped = x < -87.3f ? all(-87.3f) : x;
  F power;
  const F n = split_power(clamped * 1.44269504f, &power);
  F r = fma(n, all(-0.693359375f), clamped);
  r = fma(n, all(0.00021219444f), r);
  F poly = all(0.0013950599823147058f);
  poly = fma(poly, r, all(0.008368954062461853f));
  poly = fma(poly, r, all(0.04166620597243309f));
  poly = fma(poly, r, all(0.166665181517601f));
  poly = fma(poly, r, all(0.5f));
  poly = fma(poly, r * r, r) + 1.0f;
  return zero ? F{} : poly * power;
}
// e^x for x <= 0 in double, to a few units of 1e-16; 0 below -700.
SPECDEC_INLINE D exp(D x) {
  const D clamped = x < -700.0 ? all(-700.0) : x;
  const D magic = all(6755399441055744.0);
  const D shifted = clamped * 1.4426950408889634 + magic;
  const D n = shifted - magic;
  const D power = bits<D>((bits<L>(shifted) << 52) + 0x3ff0000000000000);
  D r = fma(n, all(-0.693145751953125), clamped);
  r = fma(n, all(-1.42860682030941723e-6), r);
  constexpr double inverse_factorial[13] = {1.0,       1.0,        1.0 / 2,     1.0 / 6,       1.0 / 24,
                                            1.0 / 120, 1.0 / 720,  1.0 / 5040,  1.0 / 40320,   1.0 / 362880,
                                            1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600};
  D poly = all(inverse_factorial[12]);
  for (int i = 11; i >= 0; --i) poly = fma(poly, r, all(inverse_factorial[i]));
  return x < -700.0 ? D{} : poly * power;
}

// Noise: the arithmetic of random.h in every lane, hence without fma.
SPECDEC_INLINE F noise_log(F y) {
  const I raw = bits<I>(y);
  const I exponent = (raw - static_cast<int32_t>(noise::kSqrtHalfBits)) >> 23;
  const F f = bits<F>(raw - (exponent << 23)) - 1.0f;
  const F e = __builtin_convertvector(exponent, F);
  F poly = all(noise::kP[7]);
  for (int i = 6; i >= 0; --i) poly = poly * f + noise::kP[i];
  const F square = f * f;
  F tail = poly * f * square;
  tail = tail + e * noise::kLn2Low;
  tail = tail - square * 0.5f;
  return (f + tail) + e * noise::kLn2High;
}
SPECDEC_INLINE F from_words(U word) {  // nearest float of each word
  return __builtin_convertvector(word, F);
}
SPECDEC_INLINE F gumbel_of(U word) {
  const F x = (from_words(word) + 0.5f) * noise::kInverse32;
  F poly = all(noise::kQ[4]);
  for (int i = 3; i >= 0; --i) poly = poly * x + noise::kQ[i];
  const F small = x + (x * x) * poly;
  const F large = -noise_log((from_words(~word) + 0.5f) * noise::kInverse32);
  return -noise_log(word < noise::kSplit ? small : large);
}

// Round keys of a row's counters, broadcast to all lanes. Lanes differ only in the token, so half of the first two rounds
// is the same in every lane. It is folded into the later keys.
struct Philox {
  W key0[10], key1[10];
};
SPECDEC_INLINE void prepare(const Counter& counter, Philox* out) {
  uint32_t key0[10], key1[10];
  for (int round = 0; round < 10; ++round) {
    key0[round] = counter.key0 + round * noise::kWeyl0;
    key1[round] = counter.key1 + round * noise::kWeyl1;
  }
  const uint64_t b = uint64_t{counter.index} * noise::kMultiply1;  // of round 0
  const uint32_t x0 = static_cast<uint32_t>(b >> 32) ^ counter.position ^ key0[0];
  const uint64_t a = uint64_t{x0} * noise::kMultiply0;  // of round 1
  key1[0] ^= counter.stream;
  key0[1] ^= static_cast<uint32_t>(b);
  key1[1] ^= static_cast<uint32_t>(a >> 32);
  key1[2] ^= static_cast<uint32_t>(a);
  for (int round = 0; round < 10; ++round) {
    out->key0[round] = all(uint64_t{key0[round]});
    out->key1[round] = all(uint64_t{key1[round]});
  }
}
constexpr int kBatch = 4;          // vectors of words per piece: two independent chains of multiplications
constexpr int kWords = kBatch * N;  // tokens per piece
// Words of the kWords tokens from each of `first` (multiples of four). Lanes take counters in an order that two rounds of
// shuffles turn into token order.
template <int kPieces>
SPECDEC_INLINE void philox(const Philox& p, const uint32_t (&first)[kPieces], U (&words)[kBatch * kPieces]) {
  constexpr int kChains = 2 * kPieces;
  W x0[kChains], x1[kChains], x2[kChains], x3[kChains], counter;
  for (int i = 0; i < N / 2; ++i) counter[i] = i % 2 * (N / 4) + i / 2;
  const W m0 = all(uint64_t{noise::kMultiply0}), m1 = all(uint64_t{noise::kMultiply1});
#pragma GCC unroll 4
  for (int k = 0; k < kChains; ++k) {  // only the low halves of lanes matter: multiply_low ignores the high halves
    x0[k] = counter + ((first[k / 2] >> 2) + k % 2 * (N / 2));
    const W a = multiply_low(x0[k], m0), b = multiply_low((a >> 32) ^ p.key1[0], m1);
    x0[k] = (b >> 32) ^ p.key0[1];
    x1[k] = b;
    x2[k] = a ^ p.key1[1];
  }
#pragma GCC unroll 8
  for (int round = 2; round < 10; ++round) {
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) {
      const W a = multiply_low(x0[k], m0), b = multiply_low(x2[k], m1);
      x0[k] = (b >> 32) ^ x1[k] ^ p.key0[round];
      x2[k] = round == 2 ? (a >> 32) ^ p.key1[2] : (a >> 32) ^ x3[k] ^ p.key1[round];
      x1[k] = b;
      x3[k] = a;
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kChains; ++k) {
    const U front = every_other<false>(bits<U>(x0[k]), bits<U>(x1[k]));
    const U back = every_other<false>(bits<U>(x2[k]), bits<U>(x3[k]));
    words[2 * k] = every_other<false>(front, back);
    words[2 * k + 1] = every_other<true>(front, back);
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec

// A vector of SPECDEC_LANES floats, written with compiler vectors: one source for AVX-512, AVX2, SSE2 and NEON. Each
// instruction set's file includes it once, inside its target pragma and namespace (see tile_portable.cpp).

typedef float Floats __attribute__((vector_size(4 * SPECDEC_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * SPECDEC_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * SPECDEC_LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * SPECDEC_LANES)));
typedef int8_t Bytes __attribute__((vector_size(SPECDEC_LANES)));

constexpr int kLanes = SPECDEC_LANES;

inline Floats load(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
inline Floats load(const BFloat16* from) {
  // Compilers split conversions of vectors into many parts, so wide ones are written out.
#if SPECDEC_LANES == 16
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif SPECDEC_LANES == 8
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  Shorts raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return (Floats)(__builtin_convertvector(raw, Words) << 16);
#endif
}
inline Floats load(const Half* from) {
#if SPECDEC_LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif SPECDEC_LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats value;
  for (int i = 0; i < kLanes; ++i) value[i] = widen(from[i]);
  return value;
#endif
}
inline Floats load(const int8_t* from) {
#if SPECDEC_LANES == 16
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif SPECDEC_LANES == 8
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return __builtin_convertvector(__builtin_convertvector(raw, Ints), Floats);
#endif
}
inline void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }
// Rounds to nearest, ties to even, as narrow does.
inline void store(BFloat16* to, Floats value) {
  const Words bits = (Words)value, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
  const Shorts shorts = __builtin_convertvector(value != value ? nan : rounded, Shorts);
  __builtin_memcpy(to, &shorts, sizeof shorts);
}
inline void store(Half* to, Floats value) {
#if SPECDEC_LANES == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif SPECDEC_LANES == 8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = narrow<Half>(value[i]);
#endif
}

// The vector from element i of `count` on, zeros behind the last, and its writing.
template <class T>
inline Floats load_at(const T* from, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(from + i);
  T some[kLanes] = {};
  for (int64_t k = i; k < count; ++k) some[k - i] = from[k];
  return load(some);
}
template <class T>
inline void store_at(T* to, int64_t i, int64_t count, Floats value) {
  if (i + kLanes <= count) return store(to + i, value);
  T some[kLanes];
  store(some, value);
  for (int64_t k = i; k < count; ++k) to[k] = some[k - i];
}

inline Floats all(float value) { return value - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, fused if the hardware has it (the build turns implicit fusion off).
inline Floats fma(Floats a, Floats b, Floats c) {
#if SPECDEC_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif SPECDEC_LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Replaces lanes whose bit is clear by `fill`.
inline Floats keep(Floats value, uint32_t bits, Floats fill) {
#if SPECDEC_LANES == 16
  return (Floats)_mm512_mask_mov_ps((__m512)fill, static_cast<__mmask16>(bits), (__m512)value);
#else
  Ints bit;
  for (int i = 0; i < kLanes; ++i) bit[i] = 1 << i;
  return ((Ints{} + static_cast<int32_t>(bits)) & bit) != 0 ? value : fill;
#endif
}

using Lanes = std::make_index_sequence<kLanes>;

// join_low: lane i of a if bit STEP of i is clear, else lane i - STEP of b. join_high: the remaining lanes.
template <int STEP, size_t... I>
inline Floats join_low(Floats a, Floats b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I & STEP) ? static_cast<int>(I) - STEP + kLanes : static_cast<int>(I))...);
}
template <int STEP, size_t... I>
inline Floats join_high(Floats a, Floats b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I & STEP) ? static_cast<int>(I) + kLanes : static_cast<int>(I) + STEP)...);
}
// Exchanges each lane with the lane whose index differs in bit STEP.
template <int STEP, size_t... I>
inline Floats exchange(Floats a, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, a, (static_cast<int>(I) ^ STEP)...);
}
template <int STEP = kLanes / 2>
inline float largest(Floats value) {
  if constexpr (STEP == 0) {
    return value[0];
  } else {
    return largest<STEP / 2>(larger(value, exchange<STEP>(value, Lanes{})));
  }
}
template <int STEP = kLanes / 2>
inline float total(Floats value) {
  if constexpr (STEP == 0) {
    return value[0];
  } else {
    return total<STEP / 2>(value + exchange<STEP>(value, Lanes{}));
  }
}

// Lane i of the result is the sum of the lanes of rows[i], added in the same order for every i.
template <int STEP = 1>
inline Floats totals(Floats* rows) {
  if constexpr (STEP == kLanes) {
    return rows[0];
  } else {
    for (int i = 0; i < kLanes / (2 * STEP); ++i) {
      rows[i] = join_low<STEP>(rows[2 * i], rows[2 * i + 1], Lanes{}) + join_high<STEP>(rows[2 * i], rows[2 * i + 1], Lanes{});
    }
    return totals<2 * STEP>(rows);
  }
}

// In-place transposition of a square of kLanes rows.
template <int STEP = kLanes / 2>
inline void transpose(Floats* rows) {
  if constexpr (STEP > 0) {
    for (int i = 0; i < kLanes; ++i) {
      if (i & STEP) continue;
      const Floats low = join_low<STEP>(rows[i], rows[i + STEP], Lanes{});
      rows[i + STEP] = join_high<STEP>(rows[i], rows[i + STEP], Lanes{});
      rows[i] = low;
    }
    transpose<STEP / 2>(rows);
  }
}

// e^x for x <= 0 (relative error about 1e-7; exactly 0 below -87.3, where float would become subnormal).
inline Floats exponential(Floats x) {
  const Floats clamped = larger(x, all(-88.0f));
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = fma(clamped, all(1.44269504f), magic) - magic;
  Floats r = fma(n, all(-0.693359375f), clamped);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, all(2.12194440e-4f), r);
  Floats y = all(1.0f / 5040.0f);
  y = fma(y, r, all(1.0f / 720.0f));
  y = fma(y, r, all(1.0f / 120.0f));
  y = fma(y, r, all(1.0f / 24.0f));
  y = fma(y, r, all(1.0f / 6.0f));
  y = fma(y, r, all(0.5f));
  y = fma(y, r, all(1.0f));
  y = fma(y, r, all(1.0f));
  const Floats power = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < all(-87.3f) ? Floats{} : y * power;
}

// tanh(x).
inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = x < 0 ? -x : x;
  const Floats far = all(1.0f) - all(2.0f) * exponential(all(-2.0f) * size) / (all(1.0f) + exponential(all(-2.0f) * size));
  // Near zero the formula above loses digits. An odd Taylor polynomial is exact enough below 0.25.
  const Floats z = x * x;
  Floats y = all(-1382.0f / 155925.0f);
  y = fma(y, z, all(62.0f / 2835.0f));
  y = fma(y, z, all(-17.0f / 315.0f));
  y = fma(y, z, all(2.0f / 15.0f));
  y = fma(y, z, all(-1.0f / 3.0f));
  const Floats near = fma(y * z, x, x);
  return size < all(0.25f) ? near : x < 0 ? -far : far;
}

// Counter-based random numbers in plain C++: the same words and float bits as kernels/specdec_kernels/random.py.
//
// Philox4x32-10 (Salmon et al., SC 2011); counter (token >> 2, position, index, stream), word token & 3. Exponential and
// Gumbel variates are float polynomials of single multiplications and additions. Compile with -ffp-contract=off: a fused
// multiply-add would change bits.
#pragma once
#include <cstdint>
#include <cstring>

namespace specdec {

enum Stream : uint32_t { kReplay = 0, kAccept = 1, kDraft = 2, kRecover = 3, kDraftBlock = 4, kRecoverBlock = 5 };

// Token ids per block of two-level Gumbel-max.
constexpr int kVocabBlock = 1024;

// A counter without its token.
struct Counter {
  uint32_t key0, key1, position, index, stream;

  Counter(int64_t seed, int32_t position_, int32_t index_, uint32_t stream_)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
        position(static_cast<uint32_t>(position_)),
        index(static_cast<uint32_t>(index_)),
        stream(stream_) {}
};

namespace noise {
constexpr uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr uint32_t kSplit = 1u << 29;  // words below it keep tiny exponentials precise
constexpr float kInverse32 = 0x1p-32f;
// -log1p(-x) = x + x^2 Q(x) on [0, 1/8]; log(1 + f) = f - f^2 / 2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1].
constexpr float kQ[5] = {0.5000001788139343f, 0.3333158791065216f, 0.2506265640258789f, 0.1903098225593567f,
                         0.23242275416851044f};
constexpr float kP[8] = {0.33333316445350647f,  -0.25000810623168945f, 0.2000228613615036f,  -0.16624553501605988f,
                         0.14181196689605713f,  -0.13128767907619476f, 0.12881621718406677f, -0.07859545946121216f};
constexpr float kLn2High = 0.693359375f, kLn2Low = -0.00021219444170128554f;
constexpr uint32_t kSqrtHalfBits = 0x3F3504F3u;

// Natural logarithm of a positive normal float.
inline float log(float y) {
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  bits -= static_cast<uint32_t>(exponent) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  f -= 1.0f;
  const float e = static_cast<float>(exponent);
  float poly = kP[7];
  for (int i = 6; i >= 0; --i) poly = poly * f + kP[i];
  const float square = f * f;
  float tail = poly * f * square;
  tail = tail + e * kLn2Low;
  tail = tail - square * 0.5f;
  return (f + tail) + e * kLn2High;
}
}  // namespace noise

// Philox word of one token.
inline uint32_t random_word(const Counter& counter, uint32_t token) {
  uint32_t x[4] = {token >> 2, counter.position, counter.index, counter.stream};
  uint32_t k0 = counter.key0, k1 = counter.key1;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(x[0]) * noise::kMultiply0;
    const uint64_t second = static_cast<uint64_t>(x[2]) * noise::kMultiply1;
    const uint32_t next0 = static_cast<uint32_t>(second >> 32) ^ x[1] ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(first >> 32) ^ x[3] ^ k1;
    x[1] = static_cast<uint32_t>(second);
    x[3] = static_cast<uint32_t>(first);
    x[0] = next0;
    x[2] = next2;
    k0 += noise::kWeyl0;
    k1 += noise::kWeyl1;
  }
  return x[token & 3];
}

// Variates of one word.
inline float exponential(uint32_t word) {
  if (word < noise::kSplit) {
    const float x = (static_cast<float>(word) + 0.5f) * noise::kInverse32;
    float poly = noise::kQ[4];
    for (int i = 3; i >= 0; --i) poly = poly * x + noise::kQ[i];
    return x + (x * x) * poly;
  }
  return -noise::log((static_cast<float>(~word) + 0.5f) * noise::kInverse32);
}

inline float gumbel(uint32_t word) { return -noise::log(exponential(word)); }

// A uniform draw in (0, 1). With 24 bits, adding one half would round the largest value up to 1.
inline float uniform(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace specdec

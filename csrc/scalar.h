// Element types of tensors in plain C++: storage structs for the 16-bit formats, and exact conversions to and from float.
#pragma once
#include <cstdint>
#include <cstring>

namespace specdec {

enum class Scalar : int { Float32, BFloat16, Half, Float64 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The type of computations with values of T.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(int8_t value) { return value; }
inline float widen(BFloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Multiplication by 2^112 shifts the exponent and normalises subnormal numbers exactly.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

// Rounds to nearest, ties to even, like torch.
template <class T>
T narrow(Accumulator<T> value);

template <>
inline float narrow<float>(float value) {
  return value;
}
template <>
inline double narrow<double>(double value) {
  return value;
}
template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Half narrow<Half>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal result: let float addition round at the last place of 2^-24
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13))};
}

// Calls function(T{}) with the C++ type of `scalar`.
template <class Function>
inline void with_scalar(Scalar scalar, const Function& function) {
  switch (scalar) {
    case Scalar::Float32:
      return function(float{});
    case Scalar::BFloat16:
      return function(BFloat16{});
    case Scalar::Half:
      return function(Half{});
    case Scalar::Float64:
      return function(double{});
  }
}

}  // namespace specdec

// Random ragged inputs in heap blocks of exact size, so the address sanitizer detects every access out of bounds. One
// *_case function per file of csrc/sanitize.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "scalar.h"

namespace specdec::sanitize {

using Random = std::mt19937_64;

inline int64_t between(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
template <class T>
const T& one_of(Random& random, const std::vector<T>& choices) {
  return choices[static_cast<size_t>(between(random, 0, static_cast<int64_t>(choices.size()) - 1))];
}

// Fails the run unless `good`.
inline void expect(bool good, const char* what, uint64_t seed) {
  if (good) return;
  std::fprintf(stderr, "sanitize: %s differs (case %llu)\n", what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

// A heap block of exactly `count` elements of a scalar type, filled with values around zero.
class Block {
 public:
  Block(Scalar type, int64_t count) : type_(type), memory_(new char[static_cast<size_t>(count * bytes())]) {}
  Block(Scalar type, int64_t count, Random& random) : Block(type, count) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) set(i, normal(random));
  }
  int64_t bytes() const { return type_ == Scalar::Float64 ? 8 : type_ == Scalar::Float32 ? 4 : 2; }
  void* data() const { return memory_.get(); }
  void set(int64_t i, double value) {
    with_scalar(type_, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(data())[i] = narrow<T>(static_cast<Accumulator<T>>(value));
    });
  }
  double get(int64_t i) const {
    double value = 0;
    with_scalar(type_, [&](auto t) { value = widen(static_cast<const decltype(t)*>(data())[i]); });
    return value;
  }

 private:
  Scalar type_;
  std::unique_ptr<char[]> memory_;
};

// Packed trees: a random parent for every node but the roots.
struct Trees {
  std::vector<int32_t> offsets{0}, parents;

  Trees(Random& random, int64_t rows, int64_t most) {
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t count = between(random, 0, 3) == 0 ? 0 : between(random, 1, most);
      for (int64_t i = 0; i < count; ++i) parents.push_back(i == 0 ? -1 : static_cast<int32_t>(between(random, i > 3 ? i - 3 : 0, i - 1)));
      offsets.push_back(static_cast<int32_t>(parents.size()));
    }
  }
  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t nodes() const { return static_cast<int64_t>(parents.size()); }
};

void attention_case(uint64_t seed);
void decoder_case(uint64_t seed);
void process_logits_case(uint64_t seed);
void expand_case(uint64_t seed);
void linear_case(uint64_t seed);
void kv_cache_case(uint64_t seed);
void ngram_case(uint64_t seed);
void proposals_case(uint64_t seed);
void recurrent_case(uint64_t seed);
void suffix_case(uint64_t seed);
void verify_case(uint64_t seed);

}  // namespace specdec::sanitize

// Random distributions over logits [rows, vocab] for the sampling, tree and verification cases.
#pragma once
#include <limits>
#include <vector>

#include "sanitize/random_inputs.h"
#include "distribution/distribution_stats.h"

namespace specdec::sanitize {

// Distributions over random logits with masked, tied and broken rows. Every array has its exact size.
struct SomeDistributions {
  Block logits, inv_t, lse, cut, mass;
  std::vector<int32_t> tie_id;
  TokenDistributions dists;

  SomeDistributions(Random& random, Scalar type, int64_t rows, int64_t vocab)
      : logits(type, rows * vocab, random), inv_t(wide(type), rows), lse(wide(type), rows), cut(wide(type), rows),
        mass(wide(type), rows * block_count(vocab)), tie_id(rows) {
    std::vector<float> temperature, top_p, min_p;
    std::vector<int32_t> top_k;
    for (int64_t r = 0; r < rows; ++r) {
      temperature.push_back(one_of<float>(random, {0.0f, 0.7f, 1.0f, 1.5f}));
      top_k.push_back(one_of<int32_t>(random, {0, 0, 1, 5}));
      top_p.push_back(one_of<float>(random, {1.0f, 1.0f, 0.8f, 0.1f}));
      min_p.push_back(one_of<float>(random, {0.0f, 0.0f, 0.05f}));
      const int64_t kind = between(random, 0, 9);
      for (int64_t v = 0; v < vocab; ++v) {
        if (kind == 0 || (kind == 1 && v % 3)) logits.set(r * vocab + v, -std::numeric_limits<double>::infinity());
        if (kind == 2) logits.set(r * vocab + v, 1.0);
      }
      if (kind == 3) logits.set(r * vocab + between(random, 0, vocab - 1), std::numeric_limits<double>::quiet_NaN());
    }
    dists = {{logits.data(), rows, vocab, vocab, type}, inv_t.data(), lse.data(), cut.data(), tie_id.data(), nullptr};
    const SamplingRows sampling{temperature.data(), top_k.data(), top_p.data(), min_p.data()};
    int64_t bad = 0;
    expect(invalid_parameter(sampling, rows, &bad) == nullptr, "sampling parameters", 0);
    distribution_stats(dists.logits, sampling, inv_t.data(), lse.data(), cut.data(), tie_id.data(), mass.data());
    if (random() % 2) dists.mass = mass.data();
  }
  static Scalar wide(Scalar type) { return type == Scalar::Float64 ? Scalar::Float64 : Scalar::Float32; }
};

}  // namespace specdec::sanitize

// Two-level Gumbel-max: samples one token from unnormalised weights [V] that are computed block by block on demand.
//
// The block with the largest log(mass) + gumbel wins, then the token in it with the largest log(weight) + gumbel. Upper
// bounds of the masses skip the blocks that cannot win, and the result is the same.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "distribution/distribution.h"

namespace specdec {

// Noise of one sample: keyed, or explicit Gumbel noise (block_noise [block_count(V)], token_noise [V]).
struct GumbelNoise {
  Counter token, block;
  const float *block_noise, *token_noise;

  GumbelNoise(int64_t seed, int32_t position, int32_t index, Stream stream)
      : token(seed, position, index, stream),
        block(seed, position, index, stream + 2u),
        block_noise(nullptr),
        token_noise(nullptr) {}
};

// log(mass), -inf if Real has no normal number for the mass.
template <class Real>
Real log_of_mass(double mass) {
  const Real rounded = static_cast<Real>(mass);
  return rounded >= std::numeric_limits<Real>::min() ? static_cast<Real>(rows::log(rounded))
                                                     : -std::numeric_limits<Real>::infinity();
}

// The token of one block, whose first id is `first`.
template <class Real>
int64_t gumbel_max_in_block(const Real* weights, int count, int32_t first, const GumbelNoise& noise) {
  Best<Real> best{-std::numeric_limits<Real>::infinity(), first};
  if (noise.token_noise == nullptr) {
    rows::gumbel_max(weights, count, first, noise.token, &best);
    return best.id;
  }
  for (int i = 0; i < count; ++i) {
    const Real score = log_of_mass<Real>(weights[i]) + noise.token_noise[first + i];
    if (score > best.score) best = {score, first + i};
  }
  return best.id;
}

// weigh(block, Real* out) writes a block's weights, zero padded; it is called for few blocks. log_bound(block) is an upper
// bound of the log of the block's mass. Returns -1 if no token has weight.
template <class Real, class Weigh, class Bound>
int64_t sample_from_weights(int64_t vocab, const GumbelNoise& noise, const Weigh& weigh, const Bound& log_bound) {
  alignas(64) Real weights[kVocabBlock];
  const int64_t blocks = block_count(vocab);
  if (blocks == 1) {
    weigh(0, weights);
    if (!(rows::total(weights, static_cast<int>(vocab)) > 0)) return -1;
    return gumbel_max_in_block(weights, static_cast<int>(vocab), 0, noise);
  }
  static thread_local std::vector<double> bounds;  // upper bounds of block scores; -inf for blocks that are done
  static thread_local std::vector<float> keyed;
  const float* block_noise = noise.block_noise;
  if (block_noise == nullptr) {
    keyed.resize(blocks);
    row_kernels().gumbel_row(noise.block, blocks, keyed.data());
    block_noise = keyed.data();
  }
  bounds.resize(blocks);
  for (int64_t b = 0; b < blocks; ++b) bounds[b] = log_bound(b) + block_noise[b];
  constexpr double nothing = -std::numeric_limits<double>::infinity();
  Real best_score = -std::numeric_limits<Real>::infinity();
  int64_t best = -1, weighed = -1;
  for (;;) {
    const int64_t b = std::max_element(bounds.begin(), bounds.end()) - bounds.begin();
    if (bounds[b] == nothing || bounds[b] < best_score) break;
    bounds[b] = nothing;
    weigh(weighed = b, weights);
    const Real score = log_of_mass<Real>(rows::total(weights, block_size(vocab, b))) + block_noise[b];
    if (score > best_score || (score == best_score && best >= 0 && b < best)) best_score = score, best = b;
  }
  if (best < 0) return -1;
  if (weighed != best) weigh(best, weights);
  return gumbel_max_in_block(weights, block_size(vocab, best), static_cast<int32_t>(best * kVocabBlock), noise);
}

}  // namespace specdec

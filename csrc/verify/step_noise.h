// The randomness of one verification step over B requests: uniform draws of acceptance and the Gumbel noise of the
// recovered or bonus token. It is keyed by (seed, root position), or explicit for comparisons with the references.
#pragma once
#include <cstdint>

#include "sampling/gumbel_max.h"

namespace specdec {

struct StepNoise {
  const int64_t* seeds;           // [B]
  const int32_t* root_positions;  // [B]
  // Explicit noise: uniforms [nodes], block_noise [B, block_count(V)], token_noise [B, V]; nullptr: keyed noise.
  const float *uniforms, *block_noise, *token_noise;

  // The uniform draw in (0, 1) that accepts or rejects `node` of request b, whose root is `root`.
  float accept_uniform(int64_t b, int64_t root, int64_t node) const {
    if (uniforms != nullptr) return uniforms[node];
    return uniform(random_word(Counter(seeds[b], root_positions[b], static_cast<int32_t>(node - root), kAccept), 0));
  }

  // Noise of the token after the last accepted node of request b.
  GumbelNoise recover_noise(int64_t b, int32_t num_accepted, int64_t vocab) const {
    GumbelNoise noise(seeds[b], root_positions[b], num_accepted, kRecover);
    if (block_noise != nullptr) {
      noise.block_noise = block_noise + b * block_count(vocab);
      noise.token_noise = token_noise + b * vocab;
    }
    return noise;
  }
};

}  // namespace specdec

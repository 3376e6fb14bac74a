// The randomness of one verification step as arguments.
#pragma once
#include "bindings/distributions.h"
#include "verify/step_noise.h"

namespace specdec::bindings {

// seeds and root_positions: [rows]. uniforms [nodes], block_noise [rows, block_count(vocab)] and token_noise
// [rows, vocab] replace the keyed noise.
inline StepNoise step_noise(int64_t nodes, int64_t rows, int64_t vocab, const Tensor& seeds, const Tensor& root_positions,
                            const Maybe& uniforms, const Maybe& block_noise, const Maybe& token_noise) {
  StepNoise noise{vector<int64_t>(seeds, rows, "seeds"), vector<int32_t>(root_positions, rows, "root_positions"),
                  nullptr, nullptr, nullptr};
  if (uniforms.has_value()) noise.uniforms = vector<float>(*uniforms, nodes, "uniforms");
  if (block_noise.has_value()) {
    SPECDEC_CHECK(block_noise->dim() == 2 && block_noise->size(0) == rows && block_noise->size(1) == block_count(vocab),
                  "block_noise has shape ", shape_of(*block_noise), ", expected [", rows, ", ", block_count(vocab), "]");
    SPECDEC_CHECK(token_noise.has_value() && token_noise->dim() == 2 && token_noise->size(0) == rows &&
                      token_noise->size(1) == vocab, "token_noise has the wrong shape, expected [", rows, ", ", vocab, "]");
    noise.block_noise = input<float>(*block_noise, "block_noise");
    noise.token_noise = input<float>(*token_noise, "token_noise");
  }
  return noise;
}

}  // namespace specdec::bindings

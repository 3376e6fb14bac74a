// replay_sample and draw_sample: one token per row of a batch of laws.
#pragma once
#include "verify/law.h"

namespace specdec {

// noise: explicit Gumbel noise [R, V] or nullptr for the keyed one.
void replay_sample(const Laws& laws, const int64_t* seeds, const int32_t* positions, const float* noise,
                   int64_t* tokens);

void draw_sample(const Laws& laws, const int64_t* seeds, const int32_t* root_positions, const int32_t* index,
                 int64_t* tokens);

}  // namespace specdec

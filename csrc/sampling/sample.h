// replay_sample and draft_sample: one token per row of a batch of distributions; replay_verify: along a path of each
// tree.
#pragma once
#include "distribution/distribution.h"
#include "trees/tree.h"

namespace specdec {

// noise: explicit Gumbel noise [R, V] or nullptr for the keyed one.
void replay_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* positions, const float* noise,
                   int64_t* tokens);

// Walks every tree along the tokens that replay_sample gives at the nodes it comes to, and at no others;
// distributions may be asked for on the way. *row names the request that ended the walk when the answer is not kFine.
Walk replay_verify(const WalkedTree& tree, int64_t rows, const TokenDistributions& dists, const int64_t* seeds,
                   const int32_t* root_positions, const Path& out, int64_t* row);

void draft_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* root_positions, const int32_t* index,
                 int64_t* tokens);

}  // namespace specdec

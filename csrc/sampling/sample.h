// replay_sample and draft_sample: one token per row of R distributions over V tokens. replay_verify: replay_sample along
// one path of each of B packed trees.
#pragma once
#include "distribution/distribution.h"
#include "trees/tree.h"

namespace specdec {

// Gumbel-max with the replay noise of (seeds, positions), [R] each. noise: explicit Gumbel noise [R, V], or nullptr for
// keyed noise. tokens: [R].
void replay_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* positions, const float* noise,
                   int64_t* tokens);

// Walks every tree along the tokens of replay_sample. Only the nodes of the path are sampled, and their statistics may be
// computed on first use. If the result is not kFine, *row is the request where the walk failed.
Walk replay_verify(const WalkedTree& tree, int64_t rows, const TokenDistributions& dists, const int64_t* seeds,
                   const int32_t* root_positions, const Path& out, int64_t* row);

// Two-level Gumbel-max with the draft noise of (seeds, root_positions, index), [R] each. tokens: [R].
void draft_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* root_positions, const int32_t* index,
                 int64_t* tokens);

}  // namespace specdec

// rejection_verify: speculative sampling on packed chains by the rejection rule (Leviathan et al. 2023, algorithm 1)
// or the block rule (Sun et al. 2025, algorithm 2).
#pragma once
#include "distribution/distribution.h"
#include "trees/tree.h"

namespace specdec {

struct ChainDraft {
  const int64_t* tokens;   // [nodes], target ids
  const int32_t* offsets;  // [rows + 1]
  const int8_t* proposal_kinds;     // 0: chosen; anything else: drawn from row dist_index of the distributions
  const int32_t* dist_index;
  int64_t nodes, rows;
  const TokenDistributions* dists;          // nullptr if every node is chosen
  const int64_t* token_ids;  // target id of each draft column, distinct; nullptr: the same
};

struct ChainNoise {
  const int64_t* seeds;
  const int32_t* root_positions;
  const float *uniforms, *block_noise, *token_noise;  // explicit, or nullptr for the keyed ones
};

enum class ChainRule { kToken, kBlock };

// What is wrong with a draft, or nullptr; *at is the node (or column of token_ids).
const char* invalid_chain(const ChainDraft& draft, const TokenDistributions& target, int64_t* at);

// Both need a valid draft, valid offsets and rows of at most max_depth + 1 nodes.
void rejection_verify(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, const ChainNoise& noise, const Path& out);

// accept [nodes], residual [nodes, V]: double if target or draft logits are Float64, else float.
void rejection_thresholds(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, void* accept, void* residual);

}  // namespace specdec

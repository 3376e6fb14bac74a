// rejection_verify over packed chains of B requests with M nodes: speculative sampling by the rejection rule (Leviathan
// et al. 2023, algorithm 1) or the block rule (Sun et al. 2025, algorithm 2).
#pragma once
#include "distribution/distribution.h"
#include "trees/tree.h"
#include "verify/step_noise.h"

namespace specdec {

// Node i of a chain is the child of node i - 1.
struct ChainDraft {
  const int64_t* tokens;            // [M], target ids
  const int32_t* offsets;           // [B + 1]
  const int8_t* proposal_kinds;     // [M], 0: deterministic; anything else: sampled from row dist_index of `dists`
  const int32_t* dist_index;        // [M]
  int64_t nodes, rows;              // M, B
  const TokenDistributions* dists;  // nullptr if every node is deterministic
  const int64_t* token_ids;         // target id of each draft column, distinct; nullptr: the same ids
};

enum class ChainRule { kRejection, kBlock };

// The name of the first invalid argument, or nullptr; *at is the node (or the column of token_ids).
const char* invalid_chain(const ChainDraft& draft, const TokenDistributions& target, int64_t* at);

// The draft and its offsets must be valid, and chains have at most out.max_depth + 1 nodes.
void rejection_verify(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, const StepNoise& noise, const Path& out);

// accept [M], residual [M, V]: double if target or draft logits are Float64, else float. The draft must be valid.
void rejection_thresholds(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, void* accept, void* residual);

}  // namespace specdec

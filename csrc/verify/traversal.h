// traversal_verify: leaf-to-root verification on packed trees (Weng et al. 2025, algorithm 1).
#pragma once
#include "verify/proposals.h"

namespace specdec {

// Both need a valid draft (invalid_tree) that is at most out.max_depth deep.
void traversal_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out);

// accept [nodes], residual [nodes, V]: double if target or draft logits are Float64, else float.
void traversal_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual);

}  // namespace specdec

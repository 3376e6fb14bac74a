// traversal_verify over packed trees: leaf-to-root verification (Weng et al. 2025, algorithm 1).
#pragma once
#include "verify/residual.h"

namespace specdec {

// The draft must be valid (invalid_tree) and at most out.max_depth deep.
void traversal_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out);

// accept [M], residual [M, V]: double if target or draft logits are Float64, else float. The draft must be valid.
void traversal_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual);

}  // namespace specdec

// recursive_rejection_verify over packed trees: tests the children of a node in index order and rejects them recursively
// (Miao et al. 2024, algorithm 2; Jeon et al. 2024; Chen et al. 2024).
#pragma once
#include "verify/residual.h"

namespace specdec {

// The draft must be valid (invalid_tree) and at most out.max_depth deep.
void recursive_rejection_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out);

// accept [M], residual [M, V]: double if target or draft logits are Float64, else float. The draft must be valid.
void recursive_rejection_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual);

}  // namespace specdec

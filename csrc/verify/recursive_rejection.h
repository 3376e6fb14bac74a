// recursive_rejection_verify: rejection sampling over ordered proposals on packed trees (Miao et al. 2024, algorithm
// 2; Jeon et al. 2024; Chen et al. 2024).
#pragma once
#include "verify/proposals.h"

namespace specdec {

// Both need a valid draft (invalid_tree) that is at most out.max_depth deep.
void recursive_rejection_verify(const TreeDraft& draft, const TokenDistributions& target, const StepNoise& noise, const Path& out);

// accept [nodes], residual [nodes, V]: double if target or draft logits are Float64, else float.
void recursive_rejection_thresholds(const TreeDraft& draft, const TokenDistributions& target, void* accept, void* residual);

}  // namespace specdec

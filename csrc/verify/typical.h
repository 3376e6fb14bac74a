// typical_verify over packed trees: typical acceptance (Cai et al. 2024, Medusa, section 2.3.2). Lossy, for comparison.
#pragma once
#include "verify/residual.h"

namespace specdec {

// A token is accepted when its probability exceeds min(epsilon, delta * exp(-entropy)) of the target's distribution.
struct TypicalLimit {
  double epsilon, delta;
};

// The draft must be valid (invalid_tree) and at most out.max_depth deep. Proposal kinds and draft distributions are not
// read.
void typical_verify(const TreeDraft& draft, const TokenDistributions& target, const TypicalLimit& limit, const StepNoise& noise, const Path& out);

}  // namespace specdec

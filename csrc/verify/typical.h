// typical_verify: typical acceptance on packed trees (Cai et al. 2024, Medusa, section 2.3.2). Lossy, for comparison.
#pragma once
#include "verify/proposals.h"

namespace specdec {

// A token is kept when its weight is above min(epsilon, delta * exp(-entropy)) of the distribution it stands in.
struct TypicalLimit {
  double epsilon, delta;
};

// Needs a valid draft (invalid_tree) that is at most out.max_depth deep; its marks and draft distributions are not
// looked at.
void typical_verify(const TreeDraft& draft, const TokenDistributions& target, const TypicalLimit& limit, const StepNoise& noise, const Path& out);

}  // namespace specdec

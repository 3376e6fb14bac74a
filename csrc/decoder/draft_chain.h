// Chains of tokens drafted by a decoder: its passes and the draws between them in one call, in terms of plain pointers.
// The contract is written down in kernels/specdec_kernels/ops/draft_chain/reference.py.
#pragma once
#include <cstdint>

#include "decoder/fused_forward.h"
#include "distribution/distribution_stats.h"

namespace specdec {

// What each of `batch` rows is fed (packed, one token or more) and how many tokens it then drafts (one or more).
struct ChainRows {
  const int64_t* tokens;
  const int32_t *offsets, *drafts, *rows, *page_table;  // [batch + 1], [batch] twice, [capacity, pages_per_row]
  int32_t* lengths;                                     // [capacity], grow by what was fed, drafted tokens but the last included
  int64_t batch, nodes, capacity, pages_per_row;
};

// How tokens are picked among the first `vocab`: by the noise of replay, or, with first_draw >= 0, by draws that are
// keyed by the root's position.
struct ChainPicks {
  SamplingRows sampling;
  const int64_t* seeds;
  const int32_t* positions;  // of the roots: the last tokens that are fed
  int64_t vocab, first_draw;
};

// Logits [n, vocabulary of the decoder] and their statistics, n rows of them: of the drawn tokens, level by level; with
// the noise of replay scratch for one level. mass may be null.
struct ChainDistributions {
  float *logits, *inv_t, *lse, *cut, *mass;
  int32_t* tie_id;
};

// chosen: [batch, depth], -1 behind a row's drafts, none of which is more than depth. Lengths are written when all is
// well.
AttentionProblem draft_chain(const Decoder& decoder, const ChainRows& rows, const ChainPicks& picks, int64_t depth, int64_t* chosen, const ChainDistributions& dists,
                             Isa isa = Isa::Best);

}  // namespace specdec

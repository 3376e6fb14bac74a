// draft_chain: a decoder drafts chains of up to `depth` tokens for B rows. One call runs the forward passes and the sampling
// between them, on plain pointers. kernels/specdec_kernels/ops/draft_chain/reference.py specifies it.
#pragma once
#include <cstdint>

#include "decoder/fused_forward.h"
#include "distribution/distribution_stats.h"

namespace specdec {

// The input tokens of each batch row (packed, at least one) and the number of tokens it then drafts (at least one).
struct ChainRows {
  const int64_t* tokens;                                // [nodes]
  const int32_t *offsets, *drafts, *rows, *page_table;  // [batch + 1], [batch], [batch], [capacity, pages_per_row]
  int32_t* lengths;                                     // [capacity], grow by the inputs and all drafted tokens but the last
  int64_t batch, nodes, capacity, pages_per_row;
};

// How tokens are selected from the first `vocab` ids: by replay noise, or with first_draw >= 0 by draft_sample with index
// first_draw + level, keyed by the root's position.
struct ChainPicks {
  SamplingRows sampling;
  const int64_t* seeds;      // [batch]
  const int32_t* positions;  // [batch], of the roots: the last input tokens
  int64_t vocab, first_draw;
};

// Logits [n, decoder.vocab] and their statistics [n]. With draft_sample they belong to the sampled tokens, level by level, and
// n is the number of drafts. With replay noise they are scratch memory for one level, and n is the batch. mass may be null.
struct ChainDistributions {
  float *logits, *inv_t, *lse, *cut, *mass;
  int32_t* tie_id;
};

// drafted: [batch, depth], -1 after a row's drafts, of which there are at most `depth`, and where logits have no distribution;
// token 0 is then the next input. Lengths change only on success.
AttentionProblem draft_chain(const Decoder& decoder, const ChainRows& rows, const ChainPicks& picks, int64_t depth, int64_t* drafted, const ChainDistributions& dists,
                             Isa isa = Isa::Best);

}  // namespace specdec

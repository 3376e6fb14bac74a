#include "sampling/sample.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "sampling/gumbel_max.h"

namespace specdec {
namespace {

// Best token of blocks begin .. end - 1 of one row.
template <class Real>
Best<Real> replay_blocks(const TokenDistributions& dists, int64_t r, const DistributionRow<Real>& dist, int64_t begin, int64_t end,
                         const Counter& counter, const float* noise) {
  Best<Real> best{-std::numeric_limits<Real>::infinity(), 0};
  const Matrix& logits = dists.logits;
  const int64_t first = begin * kVocabBlock, stop = std::min(end * kVocabBlock, logits.columns);
  if (noise == nullptr) {
    rows::replay(logits.type, logits.at(r, first), static_cast<int>(stop - first), static_cast<int32_t>(first), dist,
                 counter, &best);
    return best;
  }
  for (int64_t v = first; v < stop; ++v) {
    const Real logit = static_cast<Real>(logits.logit(r, v));
    if (!dist.keeps(logit, v)) continue;
    const Real scaled = logit * dist.inv_t, score = scaled + noise[v];
    if (score > best.score) best = {score, static_cast<int32_t>(v)};
  }
  return best;
}

template <class Real>
void replay_rows(const TokenDistributions& dists, const int64_t* seeds, const int32_t* positions, const float* noise,
                 int64_t* tokens) {
  const int64_t rows = dists.logits.rows, vocab = dists.logits.columns, blocks = block_count(vocab);
  constexpr int64_t kBlocksPerPiece = 32;  // noise costs more than a read: 32768 words take tens of microseconds
  const int64_t pieces = (blocks + kBlocksPerPiece - 1) / kBlocksPerPiece;
  auto noise_of = [&](int64_t r) { return noise == nullptr ? nullptr : noise + r * vocab; };
  auto counter_of = [&](int64_t r) { return Counter(seeds[r], positions[r], 0, kReplay); };
  if (pieces == 1 || rows >= 4 * thread_count()) {
    parallel_for(0, rows, std::max<int64_t>(1, row_grain(vocab) / 4), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const DistributionRow<Real> dist = dists.row<Real>(r);
        tokens[r] = dist.inv_t == 0
                        ? dist.tie_id
                        : replay_blocks(dists, r, dist, 0, blocks, counter_of(r), noise_of(r)).id;
      }
    });
    return;
  }
  std::vector<Best<Real>> parts(rows * pieces);
  parallel_for(0, rows * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / pieces, first = i % pieces * kBlocksPerPiece;
      const DistributionRow<Real> dist = dists.row<Real>(r);
      if (dist.inv_t != 0)
        parts[i] = replay_blocks(dists, r, dist, first, std::min(first + kBlocksPerPiece, blocks), counter_of(r),
                                 noise_of(r));
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    const DistributionRow<Real> dist = dists.row<Real>(r);
    Best<Real> best = parts[r * pieces];
    for (int64_t i = 1; i < pieces; ++i)
      if (parts[r * pieces + i].score > best.score) best = parts[r * pieces + i];
    tokens[r] = dist.inv_t == 0 ? dist.tie_id : best.id;
  }
}

// The token of one row.
template <class Real>
int64_t replay_token(const TokenDistributions& dists, int64_t r, int64_t seed, int32_t position) {
  TokenDistributions one = dists;
  one.logits.data = dists.logits.at(r, 0);
  one.logits.rows = 1;
  one.inv_t = static_cast<const Real*>(dists.inv_t) + r;
  one.cut = static_cast<const Real*>(dists.cut) + r;
  one.lse = one.inv_t;
  one.tie_id = dists.tie_id + r;
  int64_t token = 0;
  replay_rows<Real>(one, &seed, &position, nullptr, &token);
  return token;
}

template <class Real>
void draft_rows(const TokenDistributions& dists, const int64_t* seeds, const int32_t* root_positions, const int32_t* index,
               int64_t* tokens) {
  const int64_t rows = dists.logits.rows, vocab = dists.logits.columns, blocks = block_count(vocab);
  std::vector<double> bounds;
  if (blocks > 1) {
    std::vector<int64_t> wanted(rows);
    for (int64_t r = 0; r < rows; ++r) wanted[r] = dists.greedy(r) || dists.broken(r) ? -1 : r;
    bounds.resize(rows * blocks);
    block_bounds(dists, wanted.data(), rows, bounds.data());
  }
  parallel_for(0, rows, blocks > 1 ? 64 : row_grain(vocab) / 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (dists.greedy(r) || dists.broken(r)) {
        tokens[r] = dists.tie_id[r];
        continue;
      }
      const GumbelNoise noise(seeds[r], root_positions[r], index[r], kDraft);
      const int64_t token = sample_from_weights<Real>(
          vocab, noise,
          [&](int64_t b, Real* out) { dists.weights(r, b * kVocabBlock, block_size(vocab, b), out); },
          [&](int64_t b) { return bounds[r * blocks + b]; });
      tokens[r] = std::max<int64_t>(token, 0);
    }
  });
}

}  // namespace

void block_bounds(const TokenDistributions& dists, const int64_t* wanted, int64_t count, double* bounds, const TokenDistributions* draft,
                  const int64_t* draft_rows) {
  const Matrix& logits = dists.logits;
  const int64_t blocks = block_count(logits.columns);
  constexpr double slack = 1e-3;  // covers rounding of the true mass and of its noise
  constexpr float share = 1.00001f;  // above any rounding of p
  const bool alike = draft != nullptr && draft->logits.type == logits.type && !dists.wide();
  // Known masses need no read, so they are not worth another thread.
  const bool reads = std::any_of(wanted, wanted + count, [&](int64_t row) { return row >= 0 && !dists.has_masses(row); });
  parallel_for(0, count * blocks, reads ? kGrain / kVocabBlock : count * blocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = wanted[i / blocks], first = i % blocks * kVocabBlock;
      if (row < 0) continue;
      if (dists.has_masses(row)) {
        const double mass = dists.block_mass(row, i % blocks);
        bounds[i] = mass > 0 ? std::log(mass) + slack : -std::numeric_limits<double>::infinity();
        continue;
      }
      const void* piece = logits.at(row, first);
      const int size = block_size(logits.columns, i % blocks);
      const int64_t other = alike ? draft_rows[i / blocks] : -1;
      const double bound =
          dists.wide() ? rows::mass_bound(logits.type, piece, size, dists.row<double>(row))
          : other >= 0 && first + size <= draft->logits.columns && !draft->broken(other)
              ? rows::residual_mass(logits.type, piece, draft->logits.at(other, first), size, dists.row<float>(row),
                                    draft->row<float>(other), share)
              : rows::mass_bound(logits.type, piece, size, dists.row<float>(row));
      bounds[i] = bound > 0 ? std::log(bound) + slack : -std::numeric_limits<double>::infinity();
    }
  });
}

void replay_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* positions, const float* noise,
                   int64_t* tokens) {
  dists.wide() ? replay_rows<double>(dists, seeds, positions, noise, tokens)
              : replay_rows<float>(dists, seeds, positions, noise, tokens);
}

Walk replay_verify(const WalkedTree& tree, int64_t rows, const TokenDistributions& dists, const int64_t* seeds,
                   const int32_t* root_positions, const Path& out, int64_t* row) {
  std::vector<Walk> walks(rows);
  // Threads share the trees, or each row of logits if there are too few trees.
  const bool few = rows < thread_count();
  const int64_t grain = few ? rows : std::max<int64_t>(1, row_grain(dists.logits.columns) / 8);
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      walks[b] = walk_row(tree, b, out, [&](int64_t node, int64_t depth) {
        dists.ensure(node, !few);
        const int32_t position = root_positions[b] + static_cast<int32_t>(depth) + 1;
        return dists.wide() ? replay_token<double>(dists, node, seeds[b], position)
                           : replay_token<float>(dists, node, seeds[b], position);
      });
  });
  for (*row = 0; *row < rows; ++*row)
    if (walks[*row] != Walk::kFine) return walks[*row];
  return Walk::kFine;
}

void draft_sample(const TokenDistributions& dists, const int64_t* seeds, const int32_t* root_positions, const int32_t* index,
                 int64_t* tokens) {
  dists.wide() ? draft_rows<double>(dists, seeds, root_positions, index, tokens)
              : draft_rows<float>(dists, seeds, root_positions, index, tokens);
}

}  // namespace specdec

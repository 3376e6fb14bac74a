#include "verify/rejection.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "parallel.h"
#include "distribution/draft_vocab.h"
#include "distribution/distribution_stats.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSlack = 1.0 / 512;  // far above the error of a threshold or a rough total

bool any_sampled(const ChainDraft& draft) {
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t i = draft.offsets[b] + 1; i < draft.offsets[b + 1]; ++i)
      if (draft.proposal_kinds[i]) return true;
  return false;
}

// Ratios and residual distributions of packed chains.
template <class Real>
class Chains {
 public:
  Chains(const ChainDraft& draft, const TokenDistributions& target)
      : draft_(draft), target_(target), dists_(any_sampled(draft) ? draft.dists : nullptr, draft.token_ids) {}

  // Computes the statistics after a node, on the calling thread alone or with other threads.
  void compute_dist(int64_t node, bool alone) const { target_.ensure(node, alone); }

  // log p(x) - log q(x) of an inner node, rounded once per side; -inf for a certain rejection. The target's distribution
  // must be computed.
  double log_ratio(int64_t node) const {
    const int64_t token = draft_.tokens[node];
    const double log_p = target_.log_weight(node - 1, token);
    if (!draft_.proposal_kinds[node]) return log_p;
    const double log_q = dists_.log_weight(draft_.dist_index[node], token);
    if (log_q < kLeastLogWeight) return -kInfinity;
    return static_cast<double>(static_cast<Real>(log_p) - static_cast<Real>(log_q));
  }

  // The proposal after a node of a chain that ends before `stop`, or -1. A token without weight in q was not sampled from
  // q: it is no proposal, and nothing is subtracted from p.
  int64_t child(int64_t node, int64_t stop) const {
    const int64_t next = node + 1;
    if (next >= stop) return -1;
    return draft_.proposal_kinds[next] && dists_.log_weight(draft_.dist_index[next], draft_.tokens[next]) < kLeastLogWeight ? -1 : next;
  }

  // Rejection rule: min(1, p(x) / q(x)).
  Real threshold(int64_t node) const {
    const Real ratio = std::exp(static_cast<Real>(log_ratio(node)));
    return ratio < 1 ? ratio : Real{1};
  }

  // Whether u < threshold(node), if a rough total of the row decides it. Does not compute the row's distribution.
  std::optional<bool> passes_surely(int64_t node, double u) const {
    if (target_.lazy == nullptr) return {};
    const double log_q = draft_.proposal_kinds[node] ? dists_.log_weight(draft_.dist_index[node], draft_.tokens[node]) : 0.0;
    if (log_q < kLeastLogWeight) return {};
    const double limit = std::exp(-log_q) / u;  // x is accepted if 1 / p(x) is smaller
    if (!(limit < 1e30)) return {};
    const double most = limit * (1 + kSlack) * kRough;
    const double inv_p = rough_inverse(*target_.lazy, node - 1, draft_.tokens[node], most);
    if (inv_p < limit * (1 - kSlack)) return true;
    if (inv_p > most) return false;
    return {};
  }

  // A distribution that differs from the one after `node` by a factor near 1, and logs of upper bounds of its block
  // masses. A sample needs no more. False if no rough total bounds them.
  bool sketch(int64_t node, DistributionRow<float>* dist, double* bounds) const {
    if (std::is_same_v<Real, double> || target_.lazy == nullptr || !rough_dist(*target_.lazy, node, dist, bounds)) return false;
    for (int64_t b = 0; b < block_count(target_.logits.columns); ++b) bounds[b] = std::log(bounds[b]) + kSlack;
    return true;
  }

  // Block rule: the probability that the path reaches `node`, given that of its parent.
  double reach(int64_t node, double before) const { return std::min(1.0, before * std::exp(log_ratio(node))); }
  // Block rule: the threshold of a node with this reach; `child` < 0 for a node without a proposal. No child can be
  // accepted after a broken distribution. With u the result need only be on the correct side of u.
  double block_threshold(int64_t node, int64_t child, double reach, double u = std::nan("")) const {
    if (child < 0 || reach >= 1 || reach <= 0 || target_.broken(node)) return reach;
    return share(left_over(node, child, reach, u), reach);
  }

  // Weights of one block of target ids for the token after `node`: (reach p - q)+ after a sampled child, reach p without
  // the child's token after a deterministic one, or p.
  void residual(int64_t node, int64_t child, double reach, int64_t block, Real* out) const {
    const int64_t first = block * kVocabBlock;
    const int count = block_size(target_.logits.columns, block);
    target_.weights(node, first, count, out);
    if (child < 0) return;
    if (reach < 1)
      for (int i = 0; i < count; ++i) out[i] *= static_cast<Real>(reach);
    if (!draft_.proposal_kinds[child]) {
      const int64_t at = draft_.tokens[child] - first;
      if (at >= 0 && at < count) out[at] = 0;
      return;
    }
    alignas(64) Real q[kVocabBlock];
    dists_.weights(draft_.dist_index[child], first, count, q);
    rows::subtract(out, q, count);
  }

  // One token of p, from the results of `sketch`.
  int64_t sample(int64_t node, const DistributionRow<float>& dist, const GumbelNoise& noise, const double* bounds) const {
    const int64_t vocab = target_.logits.columns;
    const auto weigh = [&](int64_t b, float* out) {
      const int64_t first = b * kVocabBlock;
      rows::weights(target_.logits.type, target_.logits.at(node, first), block_size(vocab, b), static_cast<int32_t>(first), dist, out);
    };
    return sample_from_weights<float>(vocab, noise, weigh, [&](int64_t b) { return bounds[b]; });
  }

  // One token of the residual after `node`, or -1 if it is empty.
  int64_t sample(int64_t node, int64_t child, double reach, const GumbelNoise& noise, const double* bounds) const {
    const int64_t vocab = target_.logits.columns;
    const double below = child < 0 ? 0.0 : std::log(reach);
    return sample_from_weights<Real>(
        vocab, noise, [&](int64_t b, Real* out) { residual(node, child, reach, b, out); },
        [&](int64_t b) { return bounds[b] + below; });
  }

 private:
  static double share(double left, double reach) { return std::min(left / (left + (1.0 - reach)), reach); }

  // Total of the residual weights, or as much of it as decides whether u is below its share.
  double left_over(int64_t node, int64_t child, double reach, double u) const {
    const int64_t blocks = block_count(target_.logits.columns);
    const bool one_block = !draft_.proposal_kinds[child] && target_.has_masses(node);  // the other blocks keep their known masses
    const bool at_once =
        draft_.proposal_kinds[child] && same_columns() && target_.unfiltered(node) && draft_.dists->unfiltered(draft_.dist_index[child]);
    alignas(64) Real weights[kVocabBlock];
    double left = 0, most = target_.has_masses(node) ? 1.001 * reach : kInfinity;  // most: bound of the remaining blocks
    for (int64_t b = 0; b < blocks; ++b) {
      if (one_block && b != draft_.tokens[child] / kVocabBlock) {
        left += target_.block_mass(node, b) * reach;
        continue;
      }
      const int64_t first = b * kVocabBlock;
      const int count = block_size(target_.logits.columns, b);
      if (at_once) {
        const int64_t row = draft_.dist_index[child];
        const void *p = target_.logits.at(node, first), *q = draft_.dists->logits.at(row, first);
        left += rows::residual_mass(target_.logits.type, p, q, count, target_.row<float>(node),
                                    draft_.dists->row<float>(row), static_cast<float>(reach));
        most -= target_.has_masses(node) ? target_.block_mass(node, b) * reach : 0;
        if (u < share(left, reach) || u >= share(left + most, reach)) break;
        continue;
      }
      residual(node, child, reach, b, weights);
      left += rows::total(weights, count);
    }
    return left;
  }
  // Whether target and draft are rows of floats over the same ids.
  bool same_columns() const {
    const Matrix &p = target_.logits, &q = draft_.dists->logits;
    return draft_.token_ids == nullptr && p.type == q.type && p.columns == q.columns && !target_.wide();
  }

  const ChainDraft& draft_;
  const TokenDistributions& target_;
  DraftDistributions dists_;
};

// The last accepted node: its index in the chain, and the probability of reaching it (1 for the rejection rule).
struct End {
  int32_t index;
  double reach;
};

// How threads divide the work: each has its own chains, each has its own nodes of one chain, or all share each row of
// logits.
enum class Threads { kChains, kNodes, kRows };

// The last accepted node of a chain of at least one node. Its distribution is computed, unless nothing was rejected and
// `sketched` of the last node returns true.
template <class Real, class Uniform, class Sketched>
End walk(const Chains<Real>& chains, ChainRule rule, int64_t start, int64_t stop, Threads threads, const Uniform& accept_uniform, const Sketched& sketched) {
  const int64_t drafted = stop - start - 1;
  const bool together = threads == Threads::kNodes, alone = threads != Threads::kRows;
  if (rule == ChainRule::kRejection) {
    const int64_t kept = first_in_order(drafted + 1, together, [&](int64_t i) {
      const int64_t child = start + i + 1;
      const double u = i < drafted ? accept_uniform(child) : 0;
      if (i == drafted) {
        if (!sketched(start + i)) chains.compute_dist(start + i, alone);
        return true;
      }
      if (const auto passes = chains.passes_surely(child, u)) return !*passes;
      chains.compute_dist(start + i, alone);
      return !(u < chains.threshold(child));
    });
    if (kept < drafted) chains.compute_dist(start + kept, threads == Threads::kChains);
    return {static_cast<int32_t>(kept), 1.0};
  }
  first_in_order(drafted, together, [&](int64_t i) {
    chains.compute_dist(start + i, alone);
    return false;
  });
  std::vector<double> reach(drafted + 1, 1.0);
  for (int64_t i = 1; i <= drafted; ++i) reach[i] = chains.reach(start + i, reach[i - 1]);
  // The last node with u below its threshold. The threshold is at most the reach, so u >= reach needs no threshold.
  const int64_t rejected = first_in_order(drafted, together, [&](int64_t i) {
    const int64_t node = stop - 1 - i;
    const double u = accept_uniform(node), chance = reach[node - start];
    return u < chance && u < chains.block_threshold(node, chains.child(node, stop), chance, u);
  });
  const int64_t kept = drafted - rejected;
  chains.compute_dist(start + kept, threads == Threads::kChains);
  return {static_cast<int32_t>(kept), reach[kept]};
}

template <class Real>
void verify(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, const StepNoise& noise, const Path& out) {
  const Chains<Real> chains(draft, target);
  const int64_t vocab = target.logits.columns, blocks = block_count(vocab), width = out.max_depth + 1;

  std::vector<double> reach(draft.rows, 1.0);
  std::vector<double> bounds(blocks > 1 ? draft.rows * blocks : 0);  // logs of upper bounds of each last distribution's block masses
  std::vector<DistributionRow<float>> sketches(draft.rows, DistributionRow<float>{0, 0, 0, -1});  // tie_id < 0: none
  int64_t rows_at_once = rule == ChainRule::kRejection ? 2048 : std::max<int64_t>(1, row_grain(vocab) / 8);
  if (target.lazy != nullptr) rows_at_once = std::max<int64_t>(1, row_grain(vocab) / 4);
  // Threads share the chains, or the rows of logits of each chain if there are too few chains.
  const bool few = draft.rows < thread_count();
  if (few) rows_at_once = draft.rows;
  parallel_for(0, draft.rows, rows_at_once, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.path + b * width;
      const int32_t start = draft.offsets[b], stop = draft.offsets[b + 1];
      const bool passes = target.lazy != nullptr || rule == ChainRule::kBlock;  // over rows of logits
      const bool long_one = passes && stop - start > 1 && (stop - start) * vocab > kGrain;
      const Threads threads = !few ? Threads::kChains : long_one ? Threads::kNodes : Threads::kRows;
      End last{0, 1.0};
      std::fill_n(path, width, -1);
      if (start < stop) {
        const auto accept_uniform = [&](int64_t node) { return noise.accept_uniform(b, start, node); };
        const auto sketched = [&](int64_t node) { return blocks > 1 && chains.sketch(node, &sketches[b], &bounds[b * blocks]); };
        last = walk(chains, rule, start, stop, threads, accept_uniform, sketched);
        if (last.index + 1 < stop - start) sketches[b].tie_id = -1;
        for (int32_t i = 0; i <= last.index; ++i) path[i] = start + i;
      }
      out.num_accepted[b] = last.index;
      reach[b] = last.reach;
    }
  });

  auto last_of = [&](int64_t b) { return int64_t{draft.offsets[b]} + out.num_accepted[b]; };
  auto trivial = [&](int64_t b) {
    return draft.offsets[b] == draft.offsets[b + 1] || target.broken(last_of(b)) || target.greedy(last_of(b));
  };
  auto child_of = [&](int64_t b) { return chains.child(last_of(b), draft.offsets[b + 1]); };
  if (blocks > 1) {
    std::vector<int64_t> wanted(draft.rows), sampled_from(draft.rows, -1);
    for (int64_t b = 0; b < draft.rows; ++b) {
      wanted[b] = sketches[b].tie_id >= 0 || trivial(b) ? -1 : last_of(b);
      const int64_t child = child_of(b);
      if (child >= 0 && draft.proposal_kinds[child] && draft.token_ids == nullptr && reach[b] >= 1)
        sampled_from[b] = draft.dist_index[child];
    }
    block_bounds(target, wanted.data(), draft.rows, bounds.data(), draft.dists, sampled_from.data());
  }

  parallel_for(0, draft.rows, blocks > 1 ? 64 : std::max<int64_t>(1, row_grain(vocab) / 8),
               [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t node = last_of(b);
      const bool sketched = sketches[b].tie_id >= 0;
      if (!sketched && trivial(b)) {
        // A greedy distribution has one token, which a rejected child cannot be. A broken distribution gives 0.
        out.next_token[b] = draft.offsets[b] == draft.offsets[b + 1] ? -1 : target.tie_id[node];
        continue;
      }
      const GumbelNoise recover_noise = noise.recover_noise(b, out.num_accepted[b], vocab);
      if (sketched) {
        out.next_token[b] = std::max<int64_t>(chains.sample(node, sketches[b], recover_noise, &bounds[b * blocks]), 0);
        continue;
      }
      const double* row_bounds = bounds.data() + (blocks > 1 ? b * blocks : 0);
      const int64_t child = child_of(b);
      int64_t token = chains.sample(node, child, reach[b], recover_noise, row_bounds);
      // An empty residual: p <= q up to rounding, and the rejection is itself rounding. The token is sampled from p.
      if (token < 0 && child >= 0) {
        std::vector<double> whole(blocks);
        if (blocks > 1) block_bounds(target, &node, 1, whole.data());
        token = chains.sample(node, -1, 1.0, recover_noise, whole.data());
      }
      out.next_token[b] = std::max<int64_t>(token, 0);
    }
  });
}

template <class Real>
void thresholds(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, Real* accept, Real* residual) {
  const Chains<Real> chains(draft, target);
  const int64_t vocab = target.logits.columns, blocks = block_count(vocab), tail = draft.offsets[draft.rows];
  std::fill(accept + tail, accept + draft.nodes, Real{0});
  std::fill(residual + tail * vocab, residual + draft.nodes * vocab, Real{0});
  alignas(64) Real weights[kVocabBlock];
  for (int64_t b = 0; b < draft.rows; ++b) {
    double reach = 1;
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      const int64_t next = chains.child(node, draft.offsets[b + 1]);
      if (node == draft.offsets[b]) {
        accept[node] = Real{1};
      } else if (rule == ChainRule::kRejection) {
        accept[node] = chains.threshold(node);
      } else {
        reach = chains.reach(node, reach);
        accept[node] = static_cast<Real>(chains.block_threshold(node, next, reach));
      }
      double left = 0;
      int64_t child = next;
      for (int attempt = 0; attempt < 2 && !(left > 0); ++attempt, child = -1)
        for (int64_t block = 0; block < blocks; ++block) {
          const int count = block_size(vocab, block);
          chains.residual(node, child, reach, block, weights);
          left += rows::total(weights, count);
          std::copy_n(weights, count, residual + node * vocab + block * kVocabBlock);
        }
    }
  }
}

}  // namespace

const char* invalid_chain(const ChainDraft& draft, const TokenDistributions& target, int64_t* at) {
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t i = draft.offsets[b] + 1; i < draft.offsets[b + 1]; ++i) {
      *at = i;
      if (draft.tokens[i] < 0 || draft.tokens[i] >= target.logits.columns) return "tokens";
      if (!draft.proposal_kinds[i]) continue;
      if (draft.dists == nullptr) return "proposal_kinds";
      if (draft.dist_index[i] < 0 || draft.dist_index[i] >= draft.dists->logits.rows) return "dist_index";
    }
  return invalid_token_ids(draft.token_ids, draft.dists, target, at);
}

void rejection_verify(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, const StepNoise& noise, const Path& out) {
  with_accumulator(target, draft.dists, [&](auto real) { verify<decltype(real)>(draft, target, rule, noise, out); });
  if (target.lazy == nullptr || rule != ChainRule::kRejection) return;
  for (int64_t b = 0; b < draft.rows; ++b)  // statistics past the end of the path, or computed for u near its threshold
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node)
      if (node != draft.offsets[b] + out.num_accepted[b]) mark_uncomputed(*target.lazy, node, 1);
}

void rejection_thresholds(const ChainDraft& draft, const TokenDistributions& target, ChainRule rule, void* accept, void* residual) {
  with_accumulator(target, draft.dists, [&](auto real) {
    using Real = decltype(real);
    thresholds(draft, target, rule, static_cast<Real*>(accept), static_cast<Real*>(residual));
  });
}

}  // namespace specdec

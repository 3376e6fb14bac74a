#include "verify/chain.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "verify/race.h"

namespace specdec {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool any_drawn(const ChainDraft& draft) {
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t i = draft.offsets[b] + 1; i < draft.offsets[b + 1]; ++i)
      if (draft.drawn[i]) return true;
  return false;
}

// Columns of a draft vocabulary in the order of their target ids.
class Columns {
 public:
  Columns(const ChainDraft& draft, bool needed) : ids_(draft.token_ids) {
    if (ids_ == nullptr || !needed) return;
    count_ = draft.laws->logits.columns;
    if (std::is_sorted(ids_, ids_ + count_)) return;
    order_.resize(count_);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) { return ids_[a] < ids_[b]; });
  }

  bool mapped() const { return ids_ != nullptr; }
  bool sorted() const { return order_.empty(); }
  int64_t column(int64_t place) const { return sorted() ? place : order_[place]; }
  int64_t id(int64_t column) const { return ids_[column]; }

  // First place in id order whose id is at least `id`.
  int64_t place(int64_t id) const {
    int64_t low = 0, high = count_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids_[column(middle)] < id)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Column that stands for a target id, or -1.
  int64_t find(int64_t id) const {
    const int64_t at = place(id);
    return at < count_ && ids_[column(at)] == id ? column(at) : -1;
  }

 private:
  const int64_t* ids_;
  int64_t count_ = 0;
  std::vector<int32_t> order_;
};

// One batch under verification; Real is the type of weights.
template <class Real>
class Chains {
 public:
  Chains(const ChainDraft& draft, const Laws& target)
      : draft_(draft), target_(target), columns_(draft, draft.token_ids != nullptr && any_drawn(draft)) {}

  // min(1, p(x) / q(x)) of a node that is not a root.
  Real threshold(int64_t node) const {
    const int64_t token = draft_.tokens[node];
    const double log_p = target_.log_weight(node - 1, token);
    double log_q = 0;
    if (draft_.drawn[node]) {
      const Laws& laws = *draft_.laws;
      const int64_t column = columns_.mapped() ? columns_.find(token) : token < laws.logits.columns ? token : -1;
      log_q = column < 0 ? -kInfinity : laws.log_weight(draft_.law_row[node], column);
    }
    // q(x) = 0 means that x was not drawn from this law; rejecting it keeps the target's law whatever x is
    if (log_q == -kInfinity) return 0;
    const Real ratio = std::exp(static_cast<Real>(log_p) - static_cast<Real>(log_q));
    return ratio < 1 ? ratio : Real{1};
  }

  bool has_child(int64_t node, int64_t row_end) const { return node + 1 < row_end; }

  // Weights of one block of target ids for the draw after `node`: (p - q)+, p without the chosen child, or p itself.
  void residual(int64_t node, int64_t child, int64_t block, Real* out) const {
    const int64_t first = block * kRaceBlock;
    const int count = block_size(target_.logits.columns, block);
    target_.weights(node, first, count, out);
    if (child < 0) return;
    if (!draft_.drawn[child]) {
      const int64_t at = draft_.tokens[child] - first;
      if (at >= 0 && at < count) out[at] = 0;
      return;
    }
    alignas(64) Real q[kRaceBlock];
    draft_weights(draft_.law_row[child], first, count, q);
    rows::subtract(out, q, count);
  }

  int64_t draw(int64_t node, int64_t child, const RaceNoise& noise, const double* bounds) const {
    const int64_t vocab = target_.logits.columns;
    auto bound = [&](int64_t b) { return bounds[b]; };
    return race<Real>(vocab, noise, [&](int64_t b, Real* out) { residual(node, child, b, out); }, bound);
  }

 private:
  // q of `count` target ids from `first`, zero padded.
  void draft_weights(int64_t row, int64_t first, int count, Real* q) const {
    const Laws& laws = *draft_.laws;
    const int padded = (count + kPad - 1) / kPad * kPad;
    if (!columns_.mapped()) {
      const int64_t left = laws.logits.columns - first;
      const int have = static_cast<int>(std::clamp<int64_t>(left, 0, count));
      if (have > 0) laws.weights(row, first, have, q);
      std::fill(q + (have + kPad - 1) / kPad * kPad, q + padded, Real{0});
      return;
    }
    std::fill(q, q + padded, Real{0});
    const int64_t begin = columns_.place(first), end = columns_.place(first + count);
    alignas(64) Real piece[kRaceBlock];
    for (int64_t at = begin; at < end; at += kRaceBlock) {
      const int size = static_cast<int>(std::min<int64_t>(kRaceBlock, end - at));
      if (columns_.sorted()) laws.weights(row, at, size, piece);
      for (int i = 0; i < size; ++i) {
        const int64_t column = columns_.column(at + i);
        q[columns_.id(column) - first] =
            columns_.sorted() ? piece[i] : static_cast<Real>(std::exp(laws.log_weight(row, column)));
      }
    }
  }

  const ChainDraft& draft_;
  const Laws& target_;
  Columns columns_;
};

template <class Real>
void verify(const ChainDraft& draft, const Laws& target, const ChainNoise& noise, const Path& out) {
  const Chains<Real> chains(draft, target);
  const int64_t vocab = target.logits.columns, blocks = block_count(vocab), width = out.max_depth + 1;

  // the walk: a few scalars per row
  parallel_for(0, draft.rows, 2048, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* path = out.path + b * width;
      const int32_t start = draft.offsets[b], stop = draft.offsets[b + 1];
      int32_t accepted = 0;
      std::fill_n(path, width, -1);
      if (start < stop) path[0] = start;
      for (int32_t node = start + 1; node < stop; ++node) {
        const float coin = noise.uniforms != nullptr
                               ? noise.uniforms[node]
                               : uniform(random_word(
                                     Counter(noise.seeds[b], noise.root_positions[b], node - start, kAccept), 0));
        if (!(coin < chains.threshold(node))) break;
        path[++accepted] = node;
      }
      out.num_accepted[b] = accepted;
    }
  });

  // which blocks of each row's last law can win at all
  std::vector<double> bounds;
  auto last_of = [&](int64_t b) { return int64_t{draft.offsets[b]} + out.num_accepted[b]; };
  auto trivial = [&](int64_t b) {
    return draft.offsets[b] == draft.offsets[b + 1] || target.broken(last_of(b)) || target.greedy(last_of(b));
  };
  auto child_of = [&](int64_t b) { return last_of(b) + 1 < draft.offsets[b + 1] ? last_of(b) + 1 : -1; };
  if (blocks > 1) {
    std::vector<int64_t> wanted(draft.rows), drawn_from(draft.rows, -1);
    for (int64_t b = 0; b < draft.rows; ++b) {
      wanted[b] = trivial(b) ? -1 : last_of(b);
      const int64_t child = child_of(b);
      if (child >= 0 && draft.drawn[child] && draft.token_ids == nullptr) drawn_from[b] = draft.law_row[child];
    }
    bounds.resize(draft.rows * blocks);
    block_bounds(target, wanted.data(), draft.rows, bounds.data(), draft.laws, drawn_from.data());
  }

  parallel_for(0, draft.rows, blocks > 1 ? 64 : std::max<int64_t>(1, row_grain(vocab) / 8),
               [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t node = last_of(b);
      if (trivial(b)) {
        // a greedy law has one token, and a child that was rejected is not it; a broken law gives 0
        out.next_token[b] = draft.offsets[b] == draft.offsets[b + 1] ? -1 : target.tie_id[node];
        continue;
      }
      RaceNoise draw_noise(noise.seeds[b], noise.root_positions[b], out.num_accepted[b], kRecover);
      if (noise.block_noise != nullptr) {
        draw_noise.block_noise = noise.block_noise + b * blocks;
        draw_noise.token_noise = noise.token_noise + b * vocab;
      }
      const double* row_bounds = bounds.data() + (blocks > 1 ? b * blocks : 0);
      const int64_t child = child_of(b);
      int64_t token = chains.draw(node, child, draw_noise, row_bounds);
      // nothing left: p <= q up to rounding, so a rejection here is itself rounding; p is the law to draw from
      if (token < 0 && child >= 0) {
        std::vector<double> whole(blocks);
        if (blocks > 1) block_bounds(target, &node, 1, whole.data());
        token = chains.draw(node, -1, draw_noise, whole.data());
      }
      out.next_token[b] = std::max<int64_t>(token, 0);
    }
  });
}

template <class Real>
void thresholds(const ChainDraft& draft, const Laws& target, Real* accept, Real* residual) {
  const Chains<Real> chains(draft, target);
  const int64_t vocab = target.logits.columns, blocks = block_count(vocab), tail = draft.offsets[draft.rows];
  std::fill(accept + tail, accept + draft.nodes, Real{0});
  std::fill(residual + tail * vocab, residual + draft.nodes * vocab, Real{0});
  alignas(64) Real weights[kRaceBlock];
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t node = draft.offsets[b]; node < draft.offsets[b + 1]; ++node) {
      accept[node] = node == draft.offsets[b] ? Real{1} : chains.threshold(node);
      double left = 0;
      int64_t child = chains.has_child(node, draft.offsets[b + 1]) ? node + 1 : -1;
      for (int attempt = 0; attempt < 2 && !(left > 0); ++attempt, child = -1)
        for (int64_t block = 0; block < blocks; ++block) {
          const int count = block_size(vocab, block);
          chains.residual(node, child, block, weights);
          left += rows::total(weights, count);
          std::copy_n(weights, count, residual + node * vocab + block * kRaceBlock);
        }
    }
}

}  // namespace

const char* invalid_chain(const ChainDraft& draft, const Laws& target, int64_t* at) {
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t i = draft.offsets[b] + 1; i < draft.offsets[b + 1]; ++i) {
      *at = i;
      if (draft.tokens[i] < 0 || draft.tokens[i] >= target.logits.columns) return "tokens";
      if (!draft.drawn[i]) continue;
      if (draft.laws == nullptr) return "drawn";
      if (draft.law_row[i] < 0 || draft.law_row[i] >= draft.laws->logits.rows) return "law_row";
    }
  if (draft.token_ids != nullptr && draft.laws != nullptr)
    for (int64_t c = 0; c < draft.laws->logits.columns; ++c)
      if (draft.token_ids[c] < 0 || draft.token_ids[c] >= target.logits.columns) {
        *at = c;
        return "token_ids";
      }
  return nullptr;
}

void chain_verify(const ChainDraft& draft, const Laws& target, const ChainNoise& noise, const Path& out) {
  target.wide() || (draft.laws != nullptr && draft.laws->wide()) ? verify<double>(draft, target, noise, out)
                                                                 : verify<float>(draft, target, noise, out);
}

void chain_thresholds(const ChainDraft& draft, const Laws& target, void* accept, void* residual) {
  if (target.wide() || (draft.laws != nullptr && draft.laws->wide()))
    thresholds(draft, target, static_cast<double*>(accept), static_cast<double*>(residual));
  else
    thresholds(draft, target, static_cast<float*>(accept), static_cast<float*>(residual));
}

}  // namespace specdec

#include "verify/residual.h"

#include <cmath>

#include "distribution/draft_vocab.h"

namespace specdec {
namespace {

constexpr double kSlack = 1e-3;  // covers rounding of a block's true mass and of its noise

bool has(const std::vector<int64_t>& tokens, int64_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

void keep_distinct(std::vector<int64_t>* tokens) {
  std::sort(tokens->begin(), tokens->end());
  tokens->erase(std::unique(tokens->begin(), tokens->end()), tokens->end());
}

// Calls function(index in the block) for the tokens (ascending) that are in the block.
template <class Function>
void each_in_block(const std::vector<int64_t>& tokens, int64_t first, int count, const Function& function) {
  for (auto at = std::lower_bound(tokens.begin(), tokens.end(), first); at != tokens.end() && *at < first + count; ++at)
    function(static_cast<int>(*at - first));
}

}  // namespace

const char* invalid_tree(const TreeDraft& draft, const TokenDistributions& target, int64_t* at) {
  std::vector<bool> linked(draft.nodes, false);  // a node with two incoming links would have two depths
  for (int64_t b = 0; b < draft.rows; ++b)
    for (int64_t i = draft.offsets[b], end = draft.offsets[b + 1]; i < end; ++i) {
      *at = i;
      const int64_t child = draft.first_child[i], sibling = draft.next_sibling[i];
      if (child != -1 && (child <= i || child >= end)) return "first_child";
      if (sibling != -1 && (sibling <= i || sibling >= end)) return "next_sibling";
      if (child != -1 && linked[child]) return "first_child";
      if (child != -1) linked[child] = true;
      if (sibling != -1 && linked[sibling]) return "next_sibling";
      if (sibling != -1) linked[sibling] = true;
      if (i == draft.offsets[b]) continue;
      if (draft.tokens[i] < 0 || draft.tokens[i] >= target.logits.columns) return "tokens";
      if (draft.proposal_kinds[i] < kDeterministic || draft.proposal_kinds[i] > kSampledWithoutDeterministic) return "proposal_kinds";
      if (draft.proposal_kinds[i] == kDeterministic) continue;
      if (draft.dists == nullptr) return "proposal_kinds";
      if (draft.dist_index[i] < 0 || draft.dist_index[i] >= draft.dists->logits.rows) return "dist_index";
    }
  return invalid_token_ids(draft.token_ids, draft.dists, target, at);
}

int32_t deepest(const TreeDraft& draft) {
  std::vector<int32_t> depth(draft.nodes, 0);
  int32_t largest = 0;
  for (int64_t node = 0; node < draft.offsets[draft.rows]; ++node)
    for (int32_t child = draft.first_child[node]; child >= 0; child = draft.next_sibling[child])
      largest = std::max(largest, depth[child] = depth[node] + 1);
  return largest;
}

template <class Real>
void NodeResidual<Real>::start(int64_t node) {
  node_ = node;
  children_.clear();
  deterministic_.clear();
  removed_.clear();
  masked_.clear();
  total_ = 1;
  outside_ = -1;
  dense_ = false;
  for (int32_t c = draft_.first_child[node]; c >= 0; c = draft_.next_sibling[c]) {
    if (draft_.is_score_only(c)) continue;
    children_.push_back(c);
    if (draft_.proposal_kinds[c] == kDeterministic) deterministic_.push_back(draft_.tokens[c]);
  }
  keep_distinct(&deterministic_);
}

template <class Real>
double NodeResidual<Real>::weight(int64_t token) const {
  if (dense_) return dense_weights_[token];
  return has(removed_, token) ? 0 : static_cast<double>(static_cast<Real>(std::exp(target_.log_weight(node_, token))));
}

// Residual weights of one block, zero padded.
template <class Real>
void NodeResidual<Real>::block(int64_t b, Real* out) const {
  const int64_t first = b * kVocabBlock;
  const int count = block_size(vocab_, b);
  if (dense_) {
    std::copy_n(dense_weights_.data() + first, (count + kPad - 1) / kPad * kPad, out);
    return;
  }
  rows_.p.weights(node_, first, count, out);
  for (const int64_t token : removed_)
    if (token >= first && token < first + count) out[token - first] = 0;
}

template <class Real>
double NodeResidual<Real>::total_without(Real* weights, int count, int64_t first, const std::vector<int64_t>& tokens) {
  Real kept[kVocabBlock];
  int size = 0;
  each_in_block(tokens, first, count, [&](int at) { kept[size++] = weights[at], weights[at] = 0; });
  const double total = rows::total(weights, count);
  size = 0;
  each_in_block(tokens, first, count, [&](int at) { weights[at] = kept[size++]; });
  return total;
}

// Finds the tokens that a proposal's distribution excludes, ascending, and the scale that makes up for them.
template <class Real>
void NodeResidual<Real>::find_excluded(int index) {
  const int64_t node = children_[index];
  const int8_t kind = draft_.proposal_kinds[node];
  const int32_t row = draft_.dist_index[node];
  excluded_.clear();
  scale_ = 1;
  if (kind == kSampledWithoutEarlier) {
    for (int other = 0; other < index; ++other)
      if (draft_.proposal_kinds[children_[other]] != kDeterministic && draft_.dist_index[children_[other]] == row)
        excluded_.push_back(draft_.tokens[children_[other]]);
    keep_distinct(&excluded_);
  } else if (kind == kSampledWithoutDeterministic) {
    excluded_ = deterministic_;
  }
  if (excluded_.empty()) return;
  const Masked& known = masked(row, kind == kSampledWithoutDeterministic);
  double left = known.base;
  for (const int64_t token : known.tokens)
    if (!has(excluded_, token)) left += static_cast<Real>(q_weight(row, token));
  scale_ = 1.0 / left;
}

// One pass over a draft distribution serves all proposals of this node that exclude tokens from it.
template <class Real>
const typename NodeResidual<Real>::Masked& NodeResidual<Real>::masked(int64_t row, bool deterministic) {
  for (const Masked& known : masked_)
    if (known.row == row && known.deterministic == deterministic) return known;
  Masked made{row, deterministic, 0, {}};
  if (deterministic) {
    made.tokens = deterministic_;
  } else {
    for (const int64_t c : children_)
      if (draft_.proposal_kinds[c] != kDeterministic && draft_.dist_index[c] == row) made.tokens.push_back(draft_.tokens[c]);
    keep_distinct(&made.tokens);
  }
  alignas(64) Real q[kVocabBlock];
  rows_.q.pass(row);
  for (int64_t b = 0; b < blocks_; ++b) {
    const int count = block_size(vocab_, b);
    rows_.q.weights(row, b * kVocabBlock, count, q);
    made.base += total_without(q, count, b * kVocabBlock, made.tokens);
  }
  masked_.push_back(made);
  return masked_.back();
}

template <class Real>
double NodeResidual<Real>::proposal_prob(int index) {
  const int64_t node = children_[index], token = draft_.tokens[node];
  if (draft_.proposal_kinds[node] == kDeterministic) return 1;
  const double q = static_cast<Real>(q_weight(draft_.dist_index[node], token));
  if (!(q > 0)) return 0;
  find_excluded(index);
  return has(excluded_, token) ? 0 : q * scale_;
}

// Residual mass outside the deterministic tokens: one pass, however many of them are rejected.
template <class Real>
double NodeResidual<Real>::mass_outside() {
  if (outside_ >= 0) return outside_;
  outside_ = 0;
  alignas(64) Real weights[kVocabBlock];
  if (!dense_) rows_.p.pass(node_);
  for (int64_t b = 0; b < blocks_; ++b) {
    block(b, weights);
    outside_ += total_without(weights, block_size(vocab_, b), b * kVocabBlock, deterministic_);
  }
  return outside_;
}

// Residual mass, by additions only: a difference to the earlier mass would cancel.
template <class Real>
double NodeResidual<Real>::remaining() {
  double left = mass_outside();
  for (const int64_t token : deterministic_) left += weight(token);
  return left;
}

template <class Real>
double NodeResidual<Real>::remove_token(int64_t token, double reach) {
  const Real before = static_cast<Real>(weight(token));
  if (dense_)
    dense_weights_[token] = 0;
  else
    removed_.push_back(token);
  const double left = remaining(), share = reach * left / total_;
  if (!(share > 0)) {
    if (dense_)
      dense_weights_[token] = before;
    else
      removed_.pop_back();
    return reach_if_empty(reach);
  }
  total_ = left;
  return reach_after(share, reach);
}

template <class Real>
double NodeResidual<Real>::subtract(int index, double reach) {
  find_excluded(index);
  const int64_t row = draft_.dist_index[children_[index]];
  const Real p_scale = static_cast<Real>(reach / total_), q_scale = static_cast<Real>(scale_);
  spare_.resize(blocks_ * kVocabBlock);
  spare_totals_.resize(blocks_);
  double outside = 0;
  alignas(64) Real p[kVocabBlock];
  alignas(64) Real q[kVocabBlock];
  if (!dense_) rows_.p.pass(node_);
  rows_.q.pass(row);
  for (int64_t b = 0; b < blocks_; ++b) {
    const int64_t first = b * kVocabBlock;
    const int count = block_size(vocab_, b);
    block(b, p);
    rows_.q.weights(row, first, count, q);
    if (p_scale != 1)
      for (int i = 0; i < count; ++i) p[i] *= p_scale;
    if (!excluded_.empty()) {
      each_in_block(excluded_, first, count, [&](int at) { q[at] = 0; });
      for (int i = 0; i < count; ++i) q[i] *= q_scale;
    }
    rows::subtract(p, q, count);
    spare_totals_[b] = rows::total(p, count);
    outside += deterministic_.empty() ? spare_totals_[b] : total_without(p, count, first, deterministic_);
    std::copy_n(p, (count + kPad - 1) / kPad * kPad, spare_.data() + first);
  }
  double left = outside;
  for (const int64_t token : deterministic_) left += spare_[token];
  if (!(left > epsilon_)) return reach_if_empty(reach);
  dense_weights_.swap(spare_);
  block_totals_.swap(spare_totals_);
  dense_ = true;
  outside_ = outside;
  total_ = left;
  return reach_after(left, reach);
}

template <class Real>
double NodeResidual<Real>::reject(int index, double reach) {
  const int64_t node = children_[index];
  if (target_.broken(node_)) return reach;  // no proposal can be accepted after a broken distribution
  // A greedy distribution has one token, and rejecting any other token leaves it.
  if (!exact_ && !dense_ && (reach == 1 || reach == 0) && target_.greedy(node_)) return reach;
  return draft_.proposal_kinds[node] == kDeterministic ? remove_token(draft_.tokens[node], reach) : subtract(index, reach);
}

template <class Real>
int64_t NodeResidual<Real>::sample(const GumbelNoise& noise) const {
  if (!dense_ && (target_.broken(node_) || target_.greedy(node_))) return target_.tie_id[node_];
  auto weigh = [&](int64_t b, Real* out) { block(b, out); };
  if (dense_) {
    // Totals from before the removal of tokens are still upper bounds.
    auto bound = [&](int64_t b) { return block_totals_[b] > 0 ? std::log(block_totals_[b]) + kSlack : -INFINITY; };
    return std::max<int64_t>(specdec::sample_from_weights<Real>(vocab_, noise, weigh, bound), 0);
  }
  std::vector<double> bounds(blocks_);
  if (blocks_ > 1) block_bounds(target_, &node_, 1, bounds.data());
  auto bound = [&](int64_t b) { return bounds[b]; };
  return std::max<int64_t>(specdec::sample_from_weights<Real>(vocab_, noise, weigh, bound), 0);
}

template <class Real>
void NodeResidual<Real>::write(Real* out) const {
  alignas(64) Real weights[kVocabBlock];
  for (int64_t b = 0; b < blocks_; ++b) {
    block(b, weights);
    std::copy_n(weights, block_size(vocab_, b), out + b * kVocabBlock);
  }
}

template class NodeResidual<float>;
template class NodeResidual<double>;

}  // namespace specdec

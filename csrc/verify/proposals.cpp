#include "verify/proposals.h"

#include <cmath>

namespace specdec {
namespace {

constexpr double kSlack = 1e-3;  // for roundings of a block's true mass and of its noise

bool has(const std::vector<int64_t>& tokens, int64_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

void keep_distinct(std::vector<int64_t>* tokens) {
  std::sort(tokens->begin(), tokens->end());
  tokens->erase(std::unique(tokens->begin(), tokens->end()), tokens->end());
}

// Calls function(weight index) for the tokens (ascending) that lie in a block.
template <class Function>
void each_in_block(const std::vector<int64_t>& tokens, int64_t first, int count, const Function& function) {
  for (auto at = std::lower_bound(tokens.begin(), tokens.end(), first); at != tokens.end() && *at < first + count; ++at)
    function(static_cast<int>(*at - first));
}

}  // namespace

const char* invalid_tree(const TreeDraft& draft, const TokenDistributions& target, int64_t* at) {
  std::vector<bool> linked(draft.nodes, false);  // a node that two links lead to would have two depths
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
      if (draft.proposal_kinds[i] < kChosen || draft.proposal_kinds[i] > kDrawnWithoutChosen) return "drawn";
      if (draft.proposal_kinds[i] == kChosen) continue;
      if (draft.dists == nullptr) return "drawn";
      if (draft.dist_index[i] < 0 || draft.dist_index[i] >= draft.dists->logits.rows) return "dist_index";
    }
  if (draft.token_ids != nullptr && draft.dists != nullptr)
    for (int64_t c = 0; c < draft.dists->logits.columns; ++c)
      if (draft.token_ids[c] < 0 || draft.token_ids[c] >= target.logits.columns) {
        *at = c;
        return "token_ids";
      }
  return nullptr;
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
void Rest<Real>::start(int64_t node) {
  node_ = node;
  children_.clear();
  chosen_.clear();
  struck_.clear();
  masked_.clear();
  total_ = 1;
  others_ = -1;
  dense_ = false;
  for (int32_t c = draft_.first_child[node]; c >= 0; c = draft_.next_sibling[c]) {
    if (draft_.is_score_only(c)) continue;
    children_.push_back(c);
    if (draft_.proposal_kinds[c] == kChosen) chosen_.push_back(draft_.tokens[c]);
  }
  keep_distinct(&chosen_);
}

template <class Real>
double Rest<Real>::weight(int64_t token) const {
  if (dense_) return dense_weights_[token];
  return has(struck_, token) ? 0 : static_cast<double>(static_cast<Real>(std::exp(target_.log_weight(node_, token))));
}

// Weights of what is left in one race block, zero padded.
template <class Real>
void Rest<Real>::block(int64_t b, Real* out) const {
  const int64_t first = b * kRaceBlock;
  const int count = block_size(vocab_, b);
  if (dense_) {
    std::copy_n(dense_weights_.data() + first, (count + kPad - 1) / kPad * kPad, out);
    return;
  }
  rows_.p.weights(node_, first, count, out);
  for (const int64_t token : struck_)
    if (token >= first && token < first + count) out[token - first] = 0;
}

template <class Real>
double Rest<Real>::total_without(Real* weights, int count, int64_t first, const std::vector<int64_t>& tokens) {
  Real kept[kRaceBlock];
  int size = 0;
  each_in_block(tokens, first, count, [&](int at) { kept[size++] = weights[at], weights[at] = 0; });
  const double total = rows::total(weights, count);
  size = 0;
  each_in_block(tokens, first, count, [&](int at) { weights[at] = kept[size++]; });
  return total;
}

// Tokens that the distribution of a proposal excludes, ascending, and the scale that makes up for them.
template <class Real>
void Rest<Real>::find_gone(int place) {
  const int64_t node = children_[place];
  const int8_t mark = draft_.proposal_kinds[node];
  const int32_t row = draft_.dist_index[node];
  gone_.clear();
  scale_ = 1;
  if (mark == kDrawnWithoutEarlier) {
    for (int other = 0; other < place; ++other)
      if (draft_.proposal_kinds[children_[other]] != kChosen && draft_.dist_index[children_[other]] == row)
        gone_.push_back(draft_.tokens[children_[other]]);
    keep_distinct(&gone_);
  } else if (mark == kDrawnWithoutChosen) {
    gone_ = chosen_;
  }
  if (gone_.empty()) return;
  const Masked& known = masked(row, mark == kDrawnWithoutChosen);
  double left = known.base;
  for (const int64_t token : known.tokens)
    if (!has(gone_, token)) left += static_cast<Real>(q_weight(row, token));
  scale_ = 1.0 / left;
}

// The one pass over a draft distribution that serves all proposals of this node which exclude something from it.
template <class Real>
const typename Rest<Real>::Masked& Rest<Real>::masked(int64_t row, bool chosen) {
  for (const Masked& known : masked_)
    if (known.row == row && known.chosen == chosen) return known;
  Masked made{row, chosen, 0, {}};
  if (chosen) {
    made.tokens = chosen_;
  } else {
    for (const int64_t c : children_)
      if (draft_.proposal_kinds[c] != kChosen && draft_.dist_index[c] == row) made.tokens.push_back(draft_.tokens[c]);
    keep_distinct(&made.tokens);
  }
  alignas(64) Real q[kRaceBlock];
  rows_.q.pass(row);
  for (int64_t b = 0; b < blocks_; ++b) {
    const int count = block_size(vocab_, b);
    rows_.q.weights(row, b * kRaceBlock, count, q);
    made.base += total_without(q, count, b * kRaceBlock, made.tokens);
  }
  masked_.push_back(made);
  return masked_.back();
}

template <class Real>
double Rest<Real>::offered(int place) {
  const int64_t node = children_[place], token = draft_.tokens[node];
  if (draft_.proposal_kinds[node] == kChosen) return 1;
  const double q = static_cast<Real>(q_weight(draft_.dist_index[node], token));
  if (!(q > 0)) return 0;
  find_gone(place);
  return has(gone_, token) ? 0 : q * scale_;
}

// Mass outside the chosen tokens: one pass, however many of them are refused.
template <class Real>
double Rest<Real>::others() {
  if (others_ >= 0) return others_;
  others_ = 0;
  alignas(64) Real weights[kRaceBlock];
  if (!dense_) rows_.p.pass(node_);
  for (int64_t b = 0; b < blocks_; ++b) {
    block(b, weights);
    others_ += total_without(weights, block_size(vocab_, b), b * kRaceBlock, chosen_);
  }
  return others_;
}

// Mass of what is left. Only additions: the difference to the mass before would cancel.
template <class Real>
double Rest<Real>::remaining() {
  double left = others();
  for (const int64_t token : chosen_) left += weight(token);
  return left;
}

template <class Real>
double Rest<Real>::strike_out(int64_t token, double reach) {
  const Real before = static_cast<Real>(weight(token));
  if (dense_)
    dense_weights_[token] = 0;
  else
    struck_.push_back(token);
  const double left = remaining(), share = reach * left / total_;
  if (!(share > 0)) {
    if (dense_)
      dense_weights_[token] = before;
    else
      struck_.pop_back();
    return nothing_left(reach);
  }
  total_ = left;
  return after(share, reach);
}

template <class Real>
double Rest<Real>::subtract(int place, double reach) {
  find_gone(place);
  const int64_t row = draft_.dist_index[children_[place]];
  const Real p_scale = static_cast<Real>(reach / total_), q_scale = static_cast<Real>(scale_);
  spare_.resize(blocks_ * kRaceBlock);
  spare_totals_.resize(blocks_);
  double outside = 0;
  alignas(64) Real p[kRaceBlock];
  alignas(64) Real q[kRaceBlock];
  if (!dense_) rows_.p.pass(node_);
  rows_.q.pass(row);
  for (int64_t b = 0; b < blocks_; ++b) {
    const int64_t first = b * kRaceBlock;
    const int count = block_size(vocab_, b);
    block(b, p);
    rows_.q.weights(row, first, count, q);
    if (p_scale != 1)
      for (int i = 0; i < count; ++i) p[i] *= p_scale;
    if (!gone_.empty()) {
      each_in_block(gone_, first, count, [&](int at) { q[at] = 0; });
      for (int i = 0; i < count; ++i) q[i] *= q_scale;
    }
    rows::subtract(p, q, count);
    spare_totals_[b] = rows::total(p, count);
    outside += chosen_.empty() ? spare_totals_[b] : total_without(p, count, first, chosen_);
    std::copy_n(p, (count + kPad - 1) / kPad * kPad, spare_.data() + first);
  }
  double left = outside;
  for (const int64_t token : chosen_) left += spare_[token];
  if (!(left > dust_)) return nothing_left(reach);
  dense_weights_.swap(spare_);
  block_totals_.swap(spare_totals_);
  dense_ = true;
  others_ = outside;
  total_ = left;
  return after(left, reach);
}

template <class Real>
double Rest<Real>::refuse(int place, double reach) {
  const int64_t node = children_[place];
  if (target_.broken(node_)) return reach;  // a leaf: none of its proposals can be accepted
  // a greedy distribution has one token; refusing what is not it leaves that token, whatever the proposal was
  if (!exact_ && !dense_ && (reach == 1 || reach == 0) && target_.greedy(node_)) return reach;
  return draft_.proposal_kinds[node] == kChosen ? strike_out(draft_.tokens[node], reach) : subtract(place, reach);
}

template <class Real>
int64_t Rest<Real>::draw(const RaceNoise& noise) const {
  if (!dense_ && (target_.broken(node_) || target_.greedy(node_))) return target_.tie_id[node_];
  auto weigh = [&](int64_t b, Real* out) { block(b, out); };
  if (dense_) {
    // totals from before some tokens were struck out are bounds still
    auto bound = [&](int64_t b) { return block_totals_[b] > 0 ? std::log(block_totals_[b]) + kSlack : -INFINITY; };
    return std::max<int64_t>(specdec::race<Real>(vocab_, noise, weigh, bound), 0);
  }
  std::vector<double> bounds(blocks_);
  if (blocks_ > 1) block_bounds(target_, &node_, 1, bounds.data());
  auto bound = [&](int64_t b) { return bounds[b]; };
  return std::max<int64_t>(specdec::race<Real>(vocab_, noise, weigh, bound), 0);
}

template <class Real>
void Rest<Real>::write(Real* out) const {
  alignas(64) Real weights[kRaceBlock];
  for (int64_t b = 0; b < blocks_; ++b) {
    block(b, weights);
    std::copy_n(weights, block_size(vocab_, b), out + b * kRaceBlock);
  }
}

template class Rest<float>;
template class Rest<double>;

}  // namespace specdec

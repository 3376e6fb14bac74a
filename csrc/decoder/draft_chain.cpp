#include "decoder/draft_chain.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "distribution/rows.h"
#include "kv_cache/slots.h"
#include "sampling/sample.h"

namespace specdec {
namespace {

// The rows that still draft, and the arguments of their next forward pass.
class Chain {
 public:
  Chain(const Decoder& decoder, const ChainRows& rows, const ChainPicks& picks, int64_t depth, int64_t* drafted, const ChainDistributions& dists)
      : d_(decoder), r_(rows), p_(picks), depth_(depth), drafted_(drafted), dists_(dists), lengths_(rows.lengths, rows.lengths + rows.capacity) {}

  AttentionProblem run(Isa isa) {
    if (const AttentionProblem problem = check(); problem.text != nullptr) return problem;
    std::fill_n(drafted_, r_.batch * depth_, -1);
    tokens_.assign(r_.tokens, r_.tokens + r_.nodes);
    offsets_.assign(r_.offsets, r_.offsets + r_.batch + 1);
    for (int64_t b = 0; b < r_.batch; ++b) places_.push_back(b);
    for (int64_t level = 0; level < depth_; ++level) {
      if (level > 0) feed(level);
      if (const AttentionProblem problem = pass(isa); problem.text != nullptr) return problem;
      select_tokens(level);
    }
    for (int64_t b = 0; b < r_.batch; ++b) r_.lengths[r_.rows[b]] = lengths_[r_.rows[b]];
    return {nullptr, 0, 0, 0};
  }

 private:
  // Checks everything that a later pass would reject, so no chain fails half way.
  AttentionProblem check() const {
    const int64_t capacity = std::min(r_.pages_per_row * d_.page_size, d_.positions);
    std::vector<char> seen(static_cast<size_t>(r_.capacity), 0);
    for (int64_t b = 0; b < r_.batch; ++b) {
      const int64_t row = r_.rows[b], fed = r_.offsets[b + 1] - static_cast<int64_t>(r_.offsets[b]);
      if (row < 0 || row >= r_.capacity) return {"row id", b, row, r_.capacity};
      if (seen[row]++ != 0) return {"row id, which occurs twice,", b, row, r_.capacity};
      if (r_.offsets[b] < 0 || (b == 0 && r_.offsets[0] != 0) || r_.offsets[b + 1] > r_.nodes || fed < 1) return {"number of tokens fed (1 or more)", b, fed, r_.nodes + 1};
      if (r_.drafts[b] < 1 || r_.drafts[b] > depth_) return {"number of drafts (1 or more)", b, r_.drafts[b], depth_ + 1};
      const int64_t length = lengths_[row] + fed + r_.drafts[b] - 1;
      if (lengths_[row] < 0 || length > capacity) return {"length with its drafts", b, lengths_[row] < 0 ? lengths_[row] : length, capacity + 1};
      for (int64_t i = r_.offsets[b]; i < r_.offsets[b + 1]; ++i)
        if (r_.tokens[i] < 0 || r_.tokens[i] >= d_.vocab) return {"a token", b, r_.tokens[i], d_.vocab};
      for (int64_t p = 0; p * d_.page_size < length; ++p) {
        const int64_t page = r_.page_table[row * r_.pages_per_row + p];
        if (page < 0 || page >= d_.pages) return {"a page", b, page, d_.pages};
      }
    }
    if (r_.offsets[r_.batch] != r_.nodes) return {"end of offsets", r_.batch, r_.offsets[r_.batch], r_.nodes};
    return {nullptr, 0, 0, 0};
  }

  // Drops rows without drafts left. The inputs of the others are the tokens of the previous level.
  void feed(int64_t level) {
    places_.erase(std::remove_if(places_.begin(), places_.end(), [&](int64_t b) { return r_.drafts[b] <= level; }), places_.end());
    tokens_.clear();
    offsets_.assign(1, 0);
    for (int64_t b : places_) {
      tokens_.push_back(std::max<int64_t>(drafted_[b * depth_ + level - 1], 0));
      offsets_.push_back(static_cast<int32_t>(tokens_.size()));
    }
  }

  // Logits after the last input token of every remaining row.
  AttentionProblem pass(Isa isa) {
    const int64_t batch = count(), nodes = static_cast<int64_t>(tokens_.size());
    rows_.clear();
    wanted_.clear();
    for (int64_t i = 0; i < batch; ++i) {
      rows_.push_back(r_.rows[places_[i]]);
      wanted_.push_back(offsets_[i + 1] - 1);
    }
    table_.resize(batch * r_.pages_per_row);
    committed_.resize(batch);
    slots_.resize(nodes);
    positions_.resize(nodes);
    const SlotArguments where{r_.page_table, lengths_.data(),  rows_.data(), offsets_.data(), nullptr, r_.capacity,
                              r_.pages_per_row, batch, nodes, d_.page_size, true};
    const int64_t bad = place_nodes(where, {table_.data(), committed_.data(), slots_.data(), positions_.data()});
    if (bad >= 0) return {"length with its drafts", places_[bad], committed_[bad], r_.pages_per_row * d_.page_size};
    DecoderNodes n{};
    n.tokens = tokens_.data();
    n.positions = positions_.data();
    n.slots = slots_.data();
    n.wanted = wanted_.data();
    n.nodes = nodes;
    n.num_wanted = n.rows = batch;
    n.pages_per_row = r_.pages_per_row;
    n.page_table = table_.data();
    n.lengths = committed_.data();
    n.offsets = offsets_.data();
    return fused_forward(d_, n, dists_.logits + used_ * d_.vocab, isa);
  }

  void select_tokens(int64_t level) {
    const int64_t batch = count();
    const TokenDistributions dists = distributions(batch);
    positions_of_.resize(batch);
    seeds_.resize(batch);
    selected_.resize(batch);
    const bool sampled = p_.first_draw >= 0;
    for (int64_t i = 0; i < batch; ++i) {
      seeds_[i] = p_.seeds[places_[i]];
      positions_of_[i] = p_.positions[places_[i]] + (sampled ? 0 : static_cast<int32_t>(level) + 1);
    }
    if (sampled) {
      index_.assign(batch, static_cast<int32_t>(p_.first_draw + level));
      draft_sample(dists, seeds_.data(), positions_of_.data(), index_.data(), selected_.data());
      used_ += batch;
    } else {
      replay_sample(dists, seeds_.data(), positions_of_.data(), nullptr, selected_.data());
    }
    for (int64_t i = 0; i < batch; ++i) drafted_[places_[i] * depth_ + level] = dists.broken(i) ? -1 : selected_[i];
  }

  // The distributions of the last pass. Rows that keep every token need their largest logit alone, unless the statistics
  // are returned.
  TokenDistributions distributions(int64_t batch) {
    temperature_.resize(batch);
    top_k_.resize(batch);
    top_p_.resize(batch);
    min_p_.resize(batch);
    bool unfiltered = p_.first_draw < 0;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t b = places_[i];
      temperature_[i] = p_.sampling.temperature[b];
      top_k_[i] = p_.sampling.top_k[b];
      top_p_[i] = p_.sampling.top_p[b];
      min_p_[i] = p_.sampling.min_p[b];
      unfiltered = unfiltered && temperature_[i] > 0 && top_k_[i] == 0 && top_p_[i] >= 1 && min_p_[i] == 0;
    }
    TokenDistributions dists;
    dists.logits = {dists_.logits + used_ * d_.vocab, batch, p_.vocab, d_.vocab, Scalar::Float32};
    float *inv_t = dists_.inv_t + used_, *lse = dists_.lse + used_, *cut = dists_.cut + used_;
    float* mass = dists_.mass == nullptr ? nullptr : dists_.mass + used_ * block_count(p_.vocab);
    int32_t* tie_id = dists_.tie_id + used_;
    if (unfiltered) {
      for (int64_t i = 0; i < batch; ++i) {
        inv_t[i] = 1.0F / temperature_[i];
        const Peak<float> peak = rows::peak(Scalar::Float32, dists.logits.at(i, 0), p_.vocab, 0.0F);
        const bool usable = !peak.nan && std::isfinite(peak.logit * inv_t[i]);
        lse[i] = usable ? inv_t[i] : std::numeric_limits<float>::quiet_NaN();  // only NaN or not is read
      }
      std::fill_n(cut, batch, -std::numeric_limits<float>::infinity());
      std::fill_n(tie_id, batch, static_cast<int32_t>(p_.vocab - 1));
    } else {
      distribution_stats(dists.logits, {temperature_.data(), top_k_.data(), top_p_.data(), min_p_.data()}, inv_t, lse, cut, tie_id, mass);
    }
    dists.inv_t = inv_t;
    dists.lse = lse;
    dists.cut = cut;
    dists.tie_id = tie_id;
    dists.mass = unfiltered ? nullptr : mass;
    return dists;
  }

  int64_t count() const { return static_cast<int64_t>(places_.size()); }

  const Decoder& d_;
  const ChainRows& r_;
  const ChainPicks& p_;
  int64_t depth_;
  int64_t* drafted_;
  const ChainDistributions& dists_;
  int64_t used_ = 0;  // rows of distributions used so far
  std::vector<int64_t> places_, tokens_, wanted_, slots_, positions_, seeds_, selected_;
  std::vector<int32_t> offsets_, rows_, table_, committed_, lengths_, top_k_, index_, positions_of_;
  std::vector<float> temperature_, top_p_, min_p_;
};

}  // namespace

AttentionProblem draft_chain(const Decoder& decoder, const ChainRows& rows, const ChainPicks& picks, int64_t depth, int64_t* drafted, const ChainDistributions& dists, Isa isa) {
  return Chain(decoder, rows, picks, depth, drafted, dists).run(isa);
}

}  // namespace specdec

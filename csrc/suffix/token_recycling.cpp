#include "suffix/token_recycling.h"

namespace specdec::suffix {

void Successors::learn(int64_t token, Following following) {
  if (token >= static_cast<int64_t>(seen_.size())) seen_.resize(token + 1);
  size_ += static_cast<int64_t>(!following.empty()) - static_cast<int64_t>(!seen_[token].empty());
  seen_[token] = std::move(following);
}

const Successors::Following& Successors::after(int64_t token) const {
  static const Following nothing;
  return token >= 0 && token < static_cast<int64_t>(seen_.size()) ? seen_[token] : nothing;
}

Grown Successors::grow(int64_t root, int64_t depth, const Filters& filters, const Limits& limits) const {
  Grown out;
  const auto children = [&](int64_t token, std::vector<Continuation<int64_t>>& found) {
    const Following& following = after(token);
    if (following.empty()) return 0.0;
    const double top = following.front().second;  // weights are relative to the likeliest, so they cannot all underflow
    double seen = 0, total = 0;
    for (const auto& [next, value] : following) {
      found.push_back({next, std::exp(filters.inv_t * (value - top)), next});
      seen += std::exp(static_cast<double>(value));
      total += found.back().weight;
    }
    // Each unlisted token is at most as likely as the last listed one.
    const double rest = std::max(1.0 - seen, 0.0) * std::exp((filters.inv_t - 1.0) * following.back().second - filters.inv_t * top);
    total += rest;
    size_t kept = 0;
    for (double sum = 0; kept < found.size(); sum += found[kept++].weight)
      if (kept > 0 && (kept == static_cast<size_t>(filters.top_k) || sum >= filters.top_p * total || found[kept].weight < filters.min_p * found[0].weight)) break;
    const bool all = kept == found.size();
    found.erase(found.begin() + static_cast<int64_t>(kept), found.end());
    return all ? rest : 0.0;
  };
  suffix::grow(root, depth, limits, children, out);
  return out;
}

}  // namespace specdec::suffix

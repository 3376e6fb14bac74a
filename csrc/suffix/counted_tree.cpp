#include "suffix/counted_tree.h"

#include <utility>

namespace specdec::suffix {

CountedTree::CountedTree(int64_t depth) : depth_(depth), nodes_{{-1, -1, -1, -1, -1, 0, -1, 0}} {}

int32_t CountedTree::add_child(int32_t parent, int32_t token, int64_t text, int64_t position) {
  int32_t node = static_cast<int32_t>(nodes_.size());
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    node = free_.back();
    free_.pop_back();
  }
  const int32_t elder = nodes_[parent].first_child;
  nodes_[node] = {token, parent, -1, elder, -1, 1, text, position};
  if (elder >= 0) nodes_[elder].before = node;
  nodes_[parent].first_child = node;
  index_.insert(parent, token, node);
  return node;
}

void CountedTree::drop(int32_t node) {
  const Node gone = nodes_[node];
  index_.erase(gone.parent, gone.token);
  if (gone.next >= 0) nodes_[gone.next].before = gone.before;
  (gone.before >= 0 ? nodes_[gone.before].next : nodes_[gone.parent].first_child) = gone.next;
  free_.push_back(node);
}

// Expands a leaf that a second string reaches: the first string's next token becomes a leaf below it.
void CountedTree::expand_leaf(int32_t leaf, int64_t depth) {
  const int64_t text = nodes_[leaf].text, position = nodes_[leaf].position;
  nodes_[leaf].text = -1;
  const std::vector<int32_t>& tokens = texts_.at(text);
  if (position + depth < static_cast<int64_t>(tokens.size())) add_child(leaf, tokens[position + depth], text, position);
}

int64_t CountedTree::add(std::vector<int32_t> added) {
  const int64_t id = next_id_++, size = static_cast<int64_t>(added.size());
  const std::vector<int32_t>& tokens = texts_[id] = std::move(added);
  tokens_ += size;
  for (int64_t start = 0; start < size; ++start) {
    int32_t node = 0;
    ++nodes_[0].count;
    for (int64_t depth = 0; depth < depth_; ++depth) {
      if (nodes_[node].text >= 0) expand_leaf(node, depth);
      if (start + depth == size) break;
      const int32_t child = index_.find(node, tokens[start + depth]);
      if (child < 0) {
        add_child(node, tokens[start + depth], id, start);
        break;
      }
      ++nodes_[child].count;
      node = child;
    }
  }
  return id;
}

bool CountedTree::remove(int64_t id) {
  const auto entry = texts_.find(id);
  if (entry == texts_.end()) return false;
  const std::vector<int32_t>& tokens = entry->second;
  const int64_t size = static_cast<int64_t>(tokens.size());
  std::vector<int32_t> path;
  for (int64_t start = 0; start < size; ++start) {
    path.clear();
    int32_t node = 0;
    --nodes_[0].count;
    for (int64_t depth = 0; depth < depth_ && start + depth < size && nodes_[node].text < 0; ++depth) {
      node = index_.find(node, tokens[start + depth]);
      --nodes_[node].count;
      path.push_back(node);
    }
    for (; !path.empty() && nodes_[path.back()].count == 0; path.pop_back()) drop(path.back());
  }
  tokens_ -= size;
  texts_.erase(entry);
  return true;
}

CountedTree::Place CountedTree::step(Place place, int32_t token) const {
  const Node& node = nodes_[place.node];
  if (place.depth >= depth_) return {-1, 0};
  if (node.text < 0) return {index_.find(place.node, token), place.depth + 1};
  const std::vector<int32_t>& tokens = texts_.at(node.text);
  const int64_t at = node.position + place.depth;
  const bool same = at < static_cast<int64_t>(tokens.size()) && tokens[at] == token;
  return {same ? place.node : -1, place.depth + 1};
}

CountedTree::Place CountedTree::find(const int32_t* tokens, int64_t count) const {
  Place place{0, 0};
  for (int64_t i = 0; i < count && place.node >= 0; ++i) place = step(place, tokens[i]);
  return place;
}

int64_t CountedTree::count(const std::vector<int32_t>& tokens) const {
  const Place place = find(tokens.data(), static_cast<int64_t>(tokens.size()));
  return place.node < 0 ? 0 : nodes_[place.node].count;
}

Grown CountedTree::grow(const std::vector<int32_t>& context, int64_t max_match, const Limits& limits) const {
  Grown out;
  const int64_t size = static_cast<int64_t>(context.size());
  // If a string occurs, its suffixes occur too, so binary search finds the longest.
  int64_t low = 0, high = std::min({max_match, size, depth_ - 1});
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (find(context.data() + size - middle, middle).node >= 0)
      low = middle;
    else
      high = middle - 1;
  }
  out.match = low;
  if (low < limits.min_match || low == 0) return out;
  const auto children = [&](const Place& place, std::vector<Continuation<Place>>& found) {
    if (place.depth >= depth_) return 0.0;
    const Node& node = nodes_[place.node];
    if (node.text >= 0) {
      const std::vector<int32_t>& tokens = texts_.at(node.text);
      const int64_t at = node.position + place.depth;
      if (at < static_cast<int64_t>(tokens.size())) found.push_back({tokens[at], 1.0, {place.node, place.depth + 1}});
      return unseen(found.size(), low);
    }
    for (int32_t child = node.first_child; child >= 0; child = nodes_[child].next)
      found.push_back({nodes_[child].token, static_cast<double>(nodes_[child].count), {child, place.depth + 1}});
    return unseen(found.size(), low);
  };
  suffix::grow(find(context.data() + size - low, low), depth_of(limits, low), limits, children, out);
  return out;
}

}  // namespace specdec::suffix

#include "recurrent/visits.h"

namespace specdec {
namespace {

void visit_chain(int32_t first, int32_t last, bool advance, Visits& plan) {
  for (int32_t node = first; node < last; ++node) {
    plan.visits.push_back({node, 0, node + 1 < last ? 0 : advance ? kCommitted : kDropped});
  }
}

class TreeWalk {
 public:
  // Nodes are indices in the tree until they are visited; `count` stands for the text before the roots.
  void run(int32_t first, int32_t count, const int32_t* parents, Visits& plan) {
    sizes_.assign(count + 1, 1);
    child_.assign(count + 1, -1);
    sibling_.assign(count, -1);
    largest_.assign(count + 1, -1);
    buffer_.assign(count + 1, kDropped);
    buffer_[count] = 0;
    free_.clear();
    stack_.clear();
    int32_t made = 1;
    for (int32_t node = count - 1; node >= 0; --node) {
      const int32_t parent = parents[node] < 0 ? count : parents[node];
      sizes_[parent] += sizes_[node];
      sibling_[node] = child_[parent];
      child_[parent] = node;
      if (largest_[parent] < 0 || sizes_[node] > sizes_[largest_[parent]]) largest_[parent] = node;
    }
    push_children(count);
    while (!stack_.empty()) {
      const int32_t node = stack_.back(), parent = parents[node] < 0 ? count : parents[node], from = buffer_[parent];
      stack_.pop_back();
      const bool ends_parent = node == largest_[parent];  // no other child needs the parent's state
      int32_t to = kDropped;
      if (child_[node] >= 0) {
        if (ends_parent) {
          to = from;
        } else if (!free_.empty()) {
          to = free_.back();
          free_.pop_back();
        } else {
          to = made++;
        }
      } else if (ends_parent) {
        free_.push_back(from);
      }
      buffer_[node] = to;
      plan.visits.push_back({first + node, from, to});
      push_children(node);
    }
    if (made > plan.buffers) plan.buffers = made;
  }

 private:
  // The child with most descendants is at the bottom, so it is visited last.
  void push_children(int32_t parent) {
    if (child_[parent] < 0) return;
    stack_.push_back(largest_[parent]);
    for (int32_t child = child_[parent]; child >= 0; child = sibling_[child])
      if (child != largest_[parent]) stack_.push_back(child);
  }

  std::vector<int32_t> sizes_, child_, sibling_, largest_, buffer_, free_, stack_;
};

}  // namespace

Visits plan_visits(const PackedTrees& trees, bool advance) {
  Visits plan;
  TreeWalk walk;
  plan.visits.reserve(static_cast<size_t>(trees.nodes));
  for (int64_t b = 0; b < trees.batch; ++b) {
    const int32_t first = trees.offsets[b], last = trees.offsets[b + 1];
    if (first == last) continue;
    plan.requests.push_back({trees.rows[b], first, last, trees.lengths[b] == 0});
    if (trees.parents == nullptr) {
      visit_chain(first, last, advance, plan);
    } else {
      walk.run(first, last - first, trees.parents + first, plan);
    }
  }
  return plan;
}

}  // namespace specdec

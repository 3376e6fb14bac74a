// Counted tree of all strings of at most `depth` tokens in a set of texts that can be added and removed.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "suffix/edges.h"
#include "suffix/best_first.h"

namespace specdec::suffix {

class CountedTree {
 public:
  explicit CountedTree(int64_t depth);
  // Adds a text and returns its id. tokens: 0 or more.
  int64_t add(std::vector<int32_t> tokens);
  // Removes a text with all its counts. False for an unknown id.
  bool remove(int64_t id);
  // Tokens of all texts.
  int64_t size() const { return tokens_; }
  int64_t nodes() const { return static_cast<int64_t>(nodes_.size() - free_.size()) - 1; }
  // Occurrences of a string of tokens.
  int64_t count(const std::vector<int32_t>& tokens) const;
  // Grows a tree from the continuations of the context's longest suffix that occurs, of at most max_match tokens.
  Grown grow(const std::vector<int32_t>& context, int64_t max_match, const Limits& limits) const;

 private:
  // A string that occurs once is not expanded. Its node is a leaf that refers to a text and the string's start there.
  struct Node {
    int32_t token, parent, first_child, next, before;
    int64_t count, text, position;  // text < 0: children are nodes
  };
  // A string of `depth` tokens: a node, or a position below a leaf.
  struct Place {
    int32_t node;
    int64_t depth;
  };
  int32_t add_child(int32_t parent, int32_t token, int64_t text, int64_t position);
  void drop(int32_t node);
  void expand_leaf(int32_t leaf, int64_t depth);
  Place step(Place place, int32_t token) const;
  Place find(const int32_t* tokens, int64_t count) const;

  int64_t depth_, tokens_ = 0, next_id_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> free_;
  Edges index_;
  std::map<int64_t, std::vector<int32_t>> texts_;
};

}  // namespace specdec::suffix

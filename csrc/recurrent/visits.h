// The order in which a recurrence visits the nodes of packed trees, and the buffers that hold their states meanwhile.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace specdec {

// Arguments are valid: parents precede their nodes, and the rows of a batch differ if they are written.
struct PackedTrees {
  const int32_t *rows = nullptr, *lengths = nullptr;  // [batch]
  const int32_t *offsets = nullptr, *parents = nullptr;  // [batch + 1], [nodes] (nullptr: chains)
  int64_t batch = 0, nodes = 0;
};

constexpr int32_t kCommitted = -1, kDropped = -2;

// The state of a node is computed from buffer `from` into buffer `to`. Before the first visit buffer 0 is the state of the
// committed text. That state is replaced by what goes to kCommitted, and no node reads what is kDropped.
struct Visit {
  int32_t node, from, to;
};

// The visits of one request; row: of the state; fresh: its text has no tokens, so its state counts as zeros.
struct Request {
  int64_t row, first, last;
  bool fresh;
};

struct Visits {
  std::vector<Visit> visits;
  std::vector<Request> requests;  // those with nodes
  int64_t buffers = 1;            // that one request needs at most
};

// Nodes with many descendants come after their siblings and take the buffer of their parent. So a tree of n nodes needs at
// most log2(n) + 2 buffers, and a chain one. With `advance` (chains only) the last state of each request is committed.
Visits plan_visits(const PackedTrees& trees, bool advance);

}  // namespace specdec

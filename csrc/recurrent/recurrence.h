// tree_delta, tree_ssm and state_commit on the CPU, on plain pointers: linear recurrences along the ancestors of nodes.
// kernels/specdec_kernels/ops/{tree_delta, tree_ssm, state_commit}/reference.py specify them.
#pragma once
#include <cstdint>
#include <vector>

#include "isa.h"
#include "recurrent/visits.h"
#include "scalar.h"

namespace specdec {

// A contiguous tensor of float32, bfloat16 or float16; no tensor if `data` is null.
struct Operand {
  const void* data = nullptr;
  Scalar type = Scalar::Float32;
};

// What multiplies the state: one factor per head, one per key channel, or one per element (a step times `decay`).
enum class Gate : int { Head, Channel, Element };

struct Recurrence {
  Operand query, key;  // [nodes, groups, keys]
  Operand value;       // [nodes, heads, width]
  Operand gate;        // logarithms [nodes, heads] or [nodes, heads, keys], or steps [nodes, heads, width]
  Operand rate;        // [nodes, heads]: the delta rule with these learning rates; null: a sum of products
  Operand decay;       // [heads, keys, width] for Gate::Element
  Gate kind = Gate::Head;
  float* state = nullptr;  // [rows, heads, keys, width]
  int64_t row_stride = 0;  // between rows of the state
  int64_t nodes = 0, heads = 0, groups = 0, keys = 0, width = 0;
};

// Writes outputs [nodes, heads, width] in the type of the value and, for the delta rule, corrections in float32. The bits of
// a node depend on its ancestors only: not on other nodes, the number of threads, or where its column is in a vector.
// `isa` is for tests.
void walk_trees(const Recurrence& call, const PackedTrees& trees, bool advance, void* outputs, float* corrections, Isa isa = Isa::Best);

// Replays `depth` nodes of each path, [batch, depth] with -1 for none; `value` has the corrections or values. The states have
// the bits that walk_trees computes. `trees` needs rows and lengths only.
void replay_paths(const Recurrence& call, const PackedTrees& trees, const int32_t* path, int64_t depth, Isa isa = Isa::Best);

// --- internal to this folder ---

// The same in the form that vector code reads: all but values in float32. What one head reads for all nodes is contiguous,
// because rows that lie a power of two apart would share few sets of the caches.
struct PreparedRecurrence {
  const float *query = nullptr, *key = nullptr;  // [groups, nodes, keys]
  const float* gate = nullptr;  // factors [nodes, heads] or [heads, nodes, keys], or steps [nodes, heads, width]
  const float *rate = nullptr, *decay = nullptr;
  const float* dot = nullptr;  // query times key, [groups, nodes]
  Operand value;
  void* outputs = nullptr;
  float *corrections = nullptr, *state = nullptr;
  Gate kind = Gate::Head;
  int64_t row_stride = 0, nodes = 0, heads = 0, groups = 0, keys = 0, width = 0;
};

// Tiles [begin, end) of heads * ceil(width / tile), each for all requests.
using TileKernel = void (*)(const PreparedRecurrence& call, const Visits& plan, int64_t begin, int64_t end, float* scratch);

struct Convolution;

struct RecurrentKernels {
  int64_t tile;  // columns
  // Elements [begin, end): their values in float32, and their exponentials.
  void (*widen)(Operand from, float* to, int64_t begin, int64_t end);
  void (*exponentials)(Operand from, float* to, int64_t begin, int64_t end);
  void (*dots)(const float* a, const float* b, float* to, int64_t begin, int64_t end, int64_t size);  // rows of [.., size]
  TileKernel walk, replay;
  void (*convolve)(const Convolution& call, const int32_t* sources, int64_t begin, int64_t end, float* scratch);
};

// Floats of scratch that `walk` or `replay` needs.
inline int64_t scratch_of(const PreparedRecurrence& call, int64_t buffers, int64_t most_nodes, int64_t tile) {
  return (buffers + 1) * call.keys * tile + 2 * (call.keys + most_nodes * tile);
}

const RecurrentKernels& recurrent_kernels(Isa isa);
extern const RecurrentKernels kPortableRecurrent;
#if defined(__x86_64__)
extern const RecurrentKernels kAvx2Recurrent, kAvx512Recurrent;
#endif

}  // namespace specdec

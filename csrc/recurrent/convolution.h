// tree_conv and window_commit on the CPU, on plain pointers.
// kernels/specdec_kernels/ops/{tree_conv, state_commit}/reference.py specify them.
#pragma once
#include <cstdint>

#include "recurrent/recurrence.h"

namespace specdec {

struct Convolution {
  Operand inputs;              // [nodes, channels]
  Operand weight, bias;        // [channels, reach], oldest input first, and [channels] (may be null)
  void* window = nullptr;      // the last reach - 1 inputs of each text, [rows, reach - 1, channels], in the type of the inputs
  void* outputs = nullptr;     // [nodes, channels], in the type of the inputs
  int64_t row_stride = 0;      // between rows of the window
  int64_t nodes = 0, channels = 0, reach = 0;  // reach: inputs that an output depends on
  bool silu = false, advance = false;  // advance: windows move behind the last node of chains
  PackedTrees trees;
};

// The bits of a node depend on its ancestors only. `isa` is for tests.
void convolve_trees(const Convolution& call, Isa isa = Isa::Best);

// Moves windows behind the nodes of paths, [batch, depth] with -1 for none. Sizes are in bytes, but for depth and held (the
// rows of a window). `trees` needs rows and lengths only.
struct WindowMoves {
  char* window = nullptr;
  const char* inputs = nullptr;
  int64_t row_stride = 0, channels = 0, held = 0;
};
void move_windows(const WindowMoves& call, const PackedTrees& trees, const int32_t* path, int64_t depth);

// --- internal to this folder ---

// A source that is no node: -1 - i for row i of the window of its request.
inline int64_t window_row(int32_t source) { return -1 - static_cast<int64_t>(source); }

// Floats of scratch that `convolve` needs.
inline int64_t convolution_scratch(const Convolution& call, int64_t tile) { return 2 * (call.reach + 1) * tile; }

}  // namespace specdec

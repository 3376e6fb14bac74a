// Attention of packed tree nodes [M, H, D] over a paged cache [pages, page_size, kv_heads, D] on the CPU, on plain pointers.
// kernels/specdec_kernels/ops/tree_attention/reference.py specifies it.
#pragma once
#include <cstdint>

#include "isa.h"
#include "scalar.h"

namespace specdec {

// Strides are in elements. Pointers must not be null unless a comment says so.
struct AttentionArguments {
  Scalar type = Scalar::Float32;
  const void *query = nullptr, *keys = nullptr, *values = nullptr;
  void* out = nullptr;
  void* lse = nullptr;  // [nodes, heads] float, double for Float64; may be null
  int64_t query_node = 0, query_head = 0, out_node = 0, out_head = 0;
  int64_t key_page = 0, key_slot = 0, key_head = 0, value_page = 0, value_slot = 0, value_head = 0;
  int64_t nodes = 0, rows = 0, heads = 0, kv_heads = 0, head_dim = 0, pages = 0, page_size = 0, pages_per_row = 0, words = 0;
  const int32_t *page_table = nullptr, *lengths = nullptr, *offsets = nullptr;  // [rows, pages_per_row], [rows], [rows + 1]
  const int32_t* ancestors = nullptr;  // [nodes, words]; null: causal
  const int32_t* depth = nullptr;      // [nodes]; null: depth is the index within the row
  const void* sinks = nullptr;         // [heads] of sink_type; may be null
  Scalar sink_type = Scalar::Float32;
  double scale = 1.0, softcap = 0.0;
  int64_t window = 0;
};

// The first invalid argument; `text` is null if all are valid.
struct AttentionProblem {
  const char* text;
  int64_t row, got, limit;
};

// Checks lengths, offsets and pages, then computes. `isa` is for tests and falls back to the best one available.
AttentionProblem tree_attention(const AttentionArguments& arguments, Isa isa = Isa::Best);

// --- internal to this folder ---

// Nodes first..first + count - 1 of a row with the heads of one key/value head, over keys [key_begin, key_end).
// Query r of the tile is node first + r / group, head kv_head * group + r % group.
struct Tile {
  int64_t row, kv_head, first, count, key_begin, key_end;
  bool wide;  // many nodes: keys are transposed first
};

// Softmax state of a tile's queries: running maximum, sum of weights, weighted sum of values [rows, padded width].
struct Partial {
  float *max, *sum, *acc;
};

constexpr int64_t kKeyBlock = 64;  // keys per block; blocks start at multiples of it
constexpr int64_t kMostNodes = 192;   // of a tile
constexpr int64_t kWidestHead = 512;  // largest head_dim

// One tile implementation per instruction set.
struct TileKernel {
  int64_t lanes;
  // Computes the softmax state of a tile. `following`, unless null, is the next tile of this thread, to prefetch its keys.
  void (*attend)(const AttentionArguments& a, const Tile& tile, const Tile* following, float* scratch, Partial state);
  // Adds the state over later keys.
  void (*merge)(int64_t rows, int64_t width, Partial into, Partial from);
  // Applies the sinks, normalises and writes the outputs.
  void (*finish)(const AttentionArguments& a, const Tile& tile, Partial state);
};
extern const TileKernel kPortableTile;
#if defined(__x86_64__)
extern const TileKernel kAvx2Tile, kAvx512Tile;
#endif

inline int64_t padded(int64_t width, int64_t lanes) { return (width + lanes - 1) / lanes * lanes; }
inline int64_t partial_floats(int64_t rows, int64_t width) { return 2 * padded(rows, 16) + rows * width; }
inline Partial partial_at(float* memory, int64_t rows) {
  return {memory, memory + padded(rows, 16), memory + 2 * padded(rows, 16)};
}
inline double sink_of(const AttentionArguments& a, int64_t head) {
  double sink = 0.0;
  with_scalar(a.sink_type, [&](auto type) { sink = widen(static_cast<const decltype(type)*>(a.sinks)[head]); });
  return sink;
}
// Scratch size: queries, scores, the transposed and converted key and value blocks; for rows with branches also scores,
// weights and converted values of two blocks.
inline int64_t scratch_floats(int64_t rows, int64_t width) { return rows * (width + 5 * kKeyBlock) + 5 * kKeyBlock * width + 16; }

// float64: plain loops.
void attend_double(const AttentionArguments& a, int64_t row, int64_t node, int64_t head, double* scores);

}  // namespace specdec

// One pass of a decoder (root-mean-square norms, rotary positions, gated SiLU) over packed tree nodes on the CPU, in
// terms of plain pointers: everything between tokens and logits in one call. The contract is written down in
// kernels/specdec_kernels/ops/fused_forward/reference.py.
#pragma once
#include <cstdint>

#include "attention/tree_attention.h"
#include "isa.h"

namespace specdec {

// All in float32. Matrices lie by input, [inputs, outputs]; the head may lie by output too, where it is the embedding.
struct DecoderLayer {
  const float* norm;                 // [hidden]
  const float *query, *key, *value;  // [hidden, heads * width], twice [hidden, kv_heads * width]
  const float* out;                  // [heads * width, hidden]
  const float* mlp_norm;             // [hidden]
  const float *gate, *up, *down;     // twice [hidden, inner], [inner, hidden]
  float *keys, *values;              // [pages, page_size, kv_heads, width]
};

struct Decoder {
  const float *embedding, *norm, *head, *rotary;  // rotary: [positions, width], cosines and then sines of a position's angles
  const DecoderLayer* layer;
  int64_t layers, vocab, hidden, heads, kv_heads, width, inner, positions, pages, page_size;
  double eps, scale;
  bool head_by_input;
};

// Nodes in packed order; trees as in AttentionArguments. wanted: the num_wanted nodes whose logits are asked for; all
// of them, and nothing is read, where num_wanted is negative.
struct DecoderNodes {
  const int64_t *tokens, *positions, *slots, *wanted;
  int64_t nodes, num_wanted, rows, pages_per_row, words;
  const int32_t *page_table, *lengths, *offsets, *ancestors, *depth;
};

// Writes keys and values of the nodes into their slots, and their logits, [nodes or num_wanted, vocab]. A row's nodes
// have the same bits whatever rows are beside them and however many threads run.
AttentionProblem fused_forward(const Decoder& decoder, const DecoderNodes& nodes, float* logits, Isa isa = Isa::Best);

// --- between the files of this folder ---

// What lies between the matrices, for rows [begin, end) of contiguous [rows, ...].
struct ElementwiseKernels {
  // stream += added (where there is one), then normed = stream / rms(stream) * weight.
  void (*norm)(float* stream, const float* added, const float* weight, float* normed, int64_t begin, int64_t end, int64_t hidden, float eps);
  // Queries and keys of [rows, heads + 2 kv_heads, width] turned by the angles of their positions, in place.
  void (*rotate)(float* qkv, const float* rotary, const int64_t* positions, int64_t begin, int64_t end, int64_t heads, int64_t all, int64_t width);
  // gated = silu(gate) * up, of rows [gate, up].
  void (*gate)(const float* gate_up, float* gated, int64_t begin, int64_t end, int64_t inner);
};
extern const ElementwiseKernels kPortableElementwise;
#if defined(__x86_64__)
extern const ElementwiseKernels kAvx2Elementwise, kAvx512Elementwise;
#endif

}  // namespace specdec

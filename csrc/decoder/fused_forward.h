// The fused forward of a decoder (RMS norm, rotary embedding, gated SiLU) over packed tree nodes [M] on the CPU, on plain
// pointers: everything between tokens [M] and logits [M, V] in one call.
// kernels/specdec_kernels/ops/fused_forward/reference.py specifies it.
#pragma once
#include <cstdint>

#include "attention/tree_attention.h"
#include "isa.h"
#include "scalar.h"

namespace specdec {

// Tensors have the decoder's type. Matrices are stored by input, [inputs, outputs], or all by output. A head that is the
// embedding is stored by output. Biases, norms and scales from query_bias on may be null. With scales, float32 [outputs] of
// every matrix and of the head, these are int8 and stored by output. The order is that of DecoderTable.
struct DecoderLayer {
  const void* norm;                 // [hidden]
  const void *query, *key, *value;  // [hidden, heads * width], twice [hidden, kv_heads * width]
  const void* out;                  // [heads * width, hidden]
  const void* mlp_norm;             // [hidden]
  const void *gate, *up, *down;     // twice [hidden, inner], [inner, hidden]
  const void *query_bias, *key_bias, *value_bias, *out_bias;
  const void *query_norm, *key_norm;      // [width]: of every head, before its rotation
  const void *post_norm, *mlp_post_norm;  // [hidden]: of what attention and MLP add
  const float *query_scale, *key_scale, *value_scale, *out_scale, *gate_scale, *up_scale, *down_scale;
  const void* rotary;                     // [positions, width]: cosines, then sines
  void *keys, *values;                    // [pages, page_size, kv_heads, width]
  int64_t window;                         // tokens that a query sees; 0: all
};

enum class Activation : int64_t { Silu, GeluTanh };

struct Decoder {
  Scalar type = Scalar::Float32;         // or BFloat16
  const void *embedding, *norm, *head;  // [vocab, hidden], [hidden], the head
  const float* head_scale;              // [vocab], or null
  const DecoderLayer* layer;
  int64_t layers, vocab, hidden, heads, kv_heads, width, inner, positions, pages, page_size;
  bool by_input, head_by_input;
  Activation activation;
  double eps, scale, softcap, logits_softcap, embedding_scale;  // a cap of 0: none
  double norm_offset;                                           // added to the weights of all norms
};

// Nodes in packed order, with trees as in AttentionArguments. wanted: the num_wanted nodes that need logits; not read if
// num_wanted is negative, which means all nodes. states: hidden states of all nodes to write to `hidden` [num_states, nodes,
// hidden] of the decoder's type: i < layers is the state entering layer i, `layers` the one behind the last layer, and
// layers + 1 that one after the final norm.
struct DecoderNodes {
  const int64_t *tokens, *positions, *slots, *wanted;  // [nodes] each, wanted [num_wanted]
  int64_t nodes, num_wanted, rows, pages_per_row, words;
  const int32_t *page_table, *lengths, *offsets, *ancestors, *depth;
  const int64_t* states;
  int64_t num_states;
  void* hidden;
};

// Writes keys and values of the nodes to their slots, and logits [nodes or num_wanted, vocab] of the decoder's type. Batch invariant: the bits of
// a row's nodes do not depend on other rows, the number of threads or the states.
AttentionProblem fused_forward(const Decoder& decoder, const DecoderNodes& nodes, void* logits, Isa isa = Isa::Best);

// --- internal to this folder ---

// The operations between the matrix products, for rows [begin, end) of contiguous [rows, ...], computed in float32. T: the
// decoder's type. The residual stream is float32.
template <class T>
struct ElementwiseKernels {
  // stream += added unless it is null, then normed = stream / rms(stream) * (weight + offset). All [rows, hidden].
  void (*norm)(float* stream, const T* added, const T* weight, T* normed, int64_t begin, int64_t end, int64_t hidden, float eps, float offset);
  // The same in place, without an addition.
  void (*norm_in_place)(T* rows, const T* weight, int64_t begin, int64_t end, int64_t hidden, float eps, float offset);
  // Rotates the first `heads` heads (queries and keys) of qkv [rows, all, width] by the angles of their positions, in place.
  void (*rotate)(T* qkv, const T* rotary, const int64_t* positions, int64_t begin, int64_t end, int64_t heads, int64_t all, int64_t width);
  // gated [rows, inner] = activation(gate) * up, for gate_up [rows, 2 * inner].
  void (*gate)(Activation activation, const T* gate_up, T* gated, int64_t begin, int64_t end, int64_t inner);
  // to [count] = from * factor.
  void (*scale)(const T* from, float factor, float* to, int64_t count);
  // values [begin, end) become cap * tanh(value / cap).
  void (*cap)(T* values, int64_t begin, int64_t end, float cap);
};
struct ElementwiseIsa {
  ElementwiseKernels<float> float32;
  ElementwiseKernels<BFloat16> bfloat16;
};
extern const ElementwiseIsa kPortableElementwise;
#if defined(__x86_64__)
extern const ElementwiseIsa kAvx2Elementwise, kAvx512Elementwise;
#endif

}  // namespace specdec

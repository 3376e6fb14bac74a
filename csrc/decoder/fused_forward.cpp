#include "decoder/fused_forward.h"

#include <algorithm>
#include <vector>

#include "linear/batch_invariant_linear.h"
#include "parallel.h"

namespace specdec {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements per piece of work that justify another thread

const ElementwiseIsa& elementwise_kernels(Isa isa) {
#if defined(__x86_64__)
  if (usable(isa) == Isa::Avx512) return kAvx512Elementwise;
  if (usable(isa) == Isa::Avx2) return kAvx2Elementwise;
#endif
  (void)isa;
  return kPortableElementwise;
}

// Buffers of a forward pass, kept between passes.
template <class T>
struct Buffers {
  std::vector<float> stream, kept_stream;
  std::vector<T> normed, qkv, attended, gate_up, gated, added, kept;
};

template <class T>
T* resized(std::vector<T>& memory, int64_t rows, int64_t width) {
  if (memory.size() < static_cast<size_t>(rows * width)) memory.resize(static_cast<size_t>(rows * width));
  return memory.data();
}

const ElementwiseKernels<float>& kernels_of(const ElementwiseIsa& isa, float) { return isa.float32; }
const ElementwiseKernels<BFloat16>& kernels_of(const ElementwiseIsa& isa, BFloat16) { return isa.bfloat16; }

template <class Body>
void each_row(int64_t rows, int64_t width, const Body& body) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(width, 1)), body);
}

template <class T>
class Pass {
 public:
  Pass(const Decoder& decoder, const DecoderNodes& nodes, Isa isa, Buffers<T>& memory)
      : d_(decoder), n_(nodes), isa_(isa), elementwise_(kernels_of(elementwise_kernels(isa), T{})), memory_(memory), rows_(nodes.nodes), heads_(decoder.heads + 2 * decoder.kv_heads) {}

  AttentionProblem run(T* logits) {
    if (const AttentionProblem problem = check(); problem.text != nullptr) return problem;
    stream_ = resized(memory_.stream, rows_, d_.hidden);
    each_row(rows_, d_.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        elementwise_.scale(typed(d_.embedding) + n_.tokens[i] * d_.hidden, static_cast<float>(d_.embedding_scale), stream_ + i * d_.hidden, d_.hidden);
      }
    });
    for (int64_t l = 0; l < d_.layers; ++l) {
      norm(d_.layer[l].norm);
      store_state(l);
      const AttentionProblem problem = attend(d_.layer[l]);
      if (problem.text != nullptr) return problem;
      if (l + 1 == d_.layers && n_.num_wanted >= 0 && !wants_last()) {  // the other nodes are not needed any more
        attended_ = wanted(attended_, memory_.kept, d_.heads * d_.width);
        stream_ = wanted(stream_, memory_.kept_stream, d_.hidden);
        rows_ = n_.num_wanted;
      }
      BatchInvariantLinear out = product(attended_, d_.layer[l].out, d_.layer[l].out_scale, d_.heads * d_.width, d_.hidden, added_ = resized(memory_.added, rows_, d_.hidden));
      out.bias = d_.layer[l].out_bias;
      batch_invariant_linear(out, isa_);
      normalise_added(d_.layer[l].post_norm);
      multiply(d_.layer[l]);
    }
    norm(d_.norm);
    if (wants_last()) {
      store_state(d_.layers);
      store_state(d_.layers + 1);
      if (n_.num_wanted >= 0) {
        normed_ = wanted(normed_, memory_.kept, d_.hidden);
        rows_ = n_.num_wanted;
      }
    }
    BatchInvariantLinear head = product(normed_, d_.head, d_.head_scale, d_.hidden, d_.vocab, logits);
    head.by_input = d_.head_by_input;
    head.stride = d_.head_by_input ? d_.vocab : d_.hidden;
    batch_invariant_linear(head, isa_);
    if (d_.logits_softcap > 0) {
      each_row(rows_, d_.vocab, [&](int64_t begin, int64_t end) {
        elementwise_.cap(logits, begin * d_.vocab, end * d_.vocab, static_cast<float>(d_.logits_softcap));
      });
    }
    return {nullptr, 0, 0, 0};
  }

 private:
  AttentionProblem check() const {
    for (int64_t i = 0; i < n_.nodes; ++i) {
      if (n_.tokens[i] < 0 || n_.tokens[i] >= d_.vocab) return {"token (row: its packed index)", i, n_.tokens[i], d_.vocab};
      if (n_.positions[i] < 0 || n_.positions[i] >= d_.positions) return {"position (row: the packed index)", i, n_.positions[i], d_.positions};
      if (n_.slots[i] >= d_.pages * d_.page_size) return {"slot (row: the packed index)", i, n_.slots[i], d_.pages * d_.page_size};
    }
    for (int64_t i = 0; i < n_.num_wanted; ++i) {
      if (n_.wanted[i] < 0 || n_.wanted[i] >= n_.nodes) return {"wanted node (row: its place)", i, n_.wanted[i], n_.nodes};
    }
    for (int64_t i = 0; i < n_.num_states; ++i) {
      if (n_.states[i] < 0 || n_.states[i] > d_.layers + 1) return {"state (row: its place)", i, n_.states[i], d_.layers + 2};
    }
    return {nullptr, 0, 0, 0};
  }

  AttentionArguments attention(const DecoderLayer& layer) const {
    AttentionArguments a;
    a.type = d_.type;
    a.query = memory_.qkv.data();
    a.out = attended_;
    a.query_node = heads_ * d_.width;
    a.query_head = a.out_head = a.key_head = a.value_head = d_.width;
    a.out_node = d_.heads * d_.width;
    a.keys = layer.keys;
    a.values = layer.values;
    a.key_slot = a.value_slot = d_.kv_heads * d_.width;
    a.key_page = a.value_page = d_.page_size * a.key_slot;
    a.nodes = n_.nodes;
    a.rows = n_.rows;
    a.heads = d_.heads;
    a.kv_heads = d_.kv_heads;
    a.head_dim = d_.width;
    a.pages = d_.pages;
    a.page_size = d_.page_size;
    a.pages_per_row = n_.pages_per_row;
    a.words = n_.words;
    a.page_table = n_.page_table;
    a.lengths = n_.lengths;
    a.offsets = n_.offsets;
    a.ancestors = n_.ancestors;
    a.depth = n_.depth;
    a.scale = d_.scale;
    a.softcap = d_.softcap;
    a.window = layer.window;
    return a;
  }

  BatchInvariantLinear product(const T* x, const void* weight, const float* scale, int64_t inputs, int64_t outputs, T* out) const {
    BatchInvariantLinear call;
    call.type = d_.type;
    call.x = x;
    call.weight = weight;
    call.scale = scale;
    call.out = out;
    call.rows = rows_;
    call.inputs = inputs;
    call.outputs = outputs;
    call.by_input = d_.by_input;
    call.stride = d_.by_input ? outputs : inputs;
    return call;
  }

  // Adds the last stage's output to the residual stream and normalises it.
  void norm(const void* weight) {
    normed_ = resized(memory_.normed, rows_, d_.hidden);
    each_row(rows_, d_.hidden, [&](int64_t begin, int64_t end) {
      elementwise_.norm(stream_, added_, typed(weight), normed_, begin, end, d_.hidden, eps(), offset());
    });
  }

  // Normalises what a stage adds, if the layer does that.
  void normalise_added(const void* weight) {
    if (weight == nullptr) return;
    each_row(rows_, d_.hidden, [&](int64_t begin, int64_t end) {
      elementwise_.norm_in_place(added_, typed(weight), begin, end, d_.hidden, eps(), offset());
    });
  }

  // Normalises every head of a row's queries and keys, if the layer does that.
  void normalise_heads(const DecoderLayer& layer, T* row) const {
    T* keys = row + d_.heads * d_.width;
    if (layer.query_norm != nullptr) elementwise_.norm_in_place(row, typed(layer.query_norm), 0, d_.heads, d_.width, eps(), offset());
    if (layer.key_norm != nullptr) elementwise_.norm_in_place(keys, typed(layer.key_norm), 0, d_.kv_heads, d_.width, eps(), offset());
  }

  static const T* typed(const void* tensor) { return static_cast<const T*>(tensor); }
  float eps() const { return static_cast<float>(d_.eps); }
  float offset() const { return static_cast<float>(d_.norm_offset); }

  // Attention over the normalised stream.
  AttentionProblem attend(const DecoderLayer& layer) {
    const int64_t width = heads_ * d_.width;
    T* qkv = resized(memory_.qkv, rows_, width);
    const int64_t queries = d_.heads * d_.width, keys = d_.kv_heads * d_.width;
    BatchInvariantLinear parts[] = {product(normed_, layer.query, layer.query_scale, d_.hidden, queries, qkv), product(normed_, layer.key, layer.key_scale, d_.hidden, keys, qkv + queries),
                         product(normed_, layer.value, layer.value_scale, d_.hidden, keys, qkv + queries + keys)};
    for (BatchInvariantLinear& part : parts) part.out_stride = width;
    parts[0].bias = layer.query_bias;
    parts[1].bias = layer.key_bias;
    parts[2].bias = layer.value_bias;
    batch_invariant_linear(parts, 3, isa_);
    each_row(rows_, width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) normalise_heads(layer, qkv + i * width);
      elementwise_.rotate(qkv, typed(layer.rotary), n_.positions, begin, end, d_.heads + d_.kv_heads, heads_, d_.width);
      const int64_t slot = d_.kv_heads * d_.width;
      for (int64_t i = begin; i < end; ++i) {
        const T* key = qkv + i * width + d_.heads * d_.width;
        if (n_.slots[i] < 0) continue;  // the trash slot
        std::copy_n(key, slot, static_cast<T*>(layer.keys) + n_.slots[i] * slot);
        std::copy_n(key + slot, slot, static_cast<T*>(layer.values) + n_.slots[i] * slot);
      }
    });
    attended_ = resized(memory_.attended, rows_, d_.heads * d_.width);
    return tree_attention(attention(layer), isa_);
  }

  void multiply(const DecoderLayer& layer) {
    norm(layer.mlp_norm);
    T *gate_up = resized(memory_.gate_up, rows_, 2 * d_.inner), *gated = resized(memory_.gated, rows_, d_.inner);
    BatchInvariantLinear parts[] = {product(normed_, layer.gate, layer.gate_scale, d_.hidden, d_.inner, gate_up), product(normed_, layer.up, layer.up_scale, d_.hidden, d_.inner, gate_up + d_.inner)};
    for (BatchInvariantLinear& part : parts) part.out_stride = 2 * d_.inner;
    batch_invariant_linear(parts, 2, isa_);
    each_row(rows_, d_.inner, [&](int64_t begin, int64_t end) { elementwise_.gate(d_.activation, gate_up, gated, begin, end, d_.inner); });
    batch_invariant_linear(product(gated, layer.down, layer.down_scale, d_.inner, d_.hidden, added_ = resized(memory_.added, rows_, d_.hidden)), isa_);
    normalise_added(layer.mlp_post_norm);
  }

  // The rows of the wanted nodes. They may be in any order, so they are copied.
  template <class E>
  E* wanted(const E* from, std::vector<E>& memory, int64_t width) const {
    E* to = resized(memory, n_.num_wanted, width);
    for (int64_t i = 0; i < n_.num_wanted; ++i) std::copy_n(from + n_.wanted[i] * width, width, to + i * width);
    return to;
  }

  // Whether states are wanted that the last layer computes, of all nodes.
  bool wants_last() const {
    return std::any_of(n_.states, n_.states + n_.num_states, [&](int64_t state) { return state >= d_.layers; });
  }

  // Writes a state if it is wanted. The stream's values are those of T, so narrowing is exact.
  void store_state(int64_t state) const {
    for (int64_t s = 0; s < n_.num_states; ++s) {
      if (n_.states[s] != state) continue;
      T* to = static_cast<T*>(n_.hidden) + s * n_.nodes * d_.hidden;
      each_row(rows_, d_.hidden, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * d_.hidden; i < end * d_.hidden; ++i) {
          to[i] = state > d_.layers ? normed_[i] : narrow<T>(stream_[i]);
        }
      });
    }
  }

  const Decoder& d_;
  const DecoderNodes& n_;
  Isa isa_;
  const ElementwiseKernels<T>& elementwise_;
  Buffers<T>& memory_;
  int64_t rows_, heads_;
  float* stream_ = nullptr;
  T *normed_ = nullptr, *attended_ = nullptr, *added_ = nullptr;
};

}  // namespace

AttentionProblem fused_forward(const Decoder& decoder, const DecoderNodes& nodes, void* logits, Isa isa) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    static thread_local Buffers<T> memory;
    return Pass<T>(decoder, nodes, isa, memory).run(static_cast<T*>(logits));
  };
  return decoder.type == Scalar::BFloat16 ? run(BFloat16{}) : run(0.0f);
}

}  // namespace specdec

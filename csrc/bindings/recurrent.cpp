// torch.ops.specdec.{tree_delta, tree_ssm, tree_conv, state_commit, window_commit}: schemas and CPU implementations.
#include <string>
#include <tuple>

#include "bindings/arguments.h"
#include "recurrent/convolution.h"
#include "recurrent/recurrence.h"

namespace specdec::bindings {
namespace {

std::string listed(const int32_t* values, int64_t count) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < count; ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

const int32_t* integers(const char* op, const char* name, const Tensor& tensor, int64_t size) {
  SPECDEC_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(), op, ": ", name,
                " is ", described(tensor), "; expected contiguous int32 [", size, "]");
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

Operand operand(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  SPECDEC_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half) && tensor.is_contiguous(), op, ": ", name,
                " is ", described(tensor), "; expected contiguous float32, bfloat16 or float16");
  return {tensor.const_data_ptr(), scalar_of(tensor, op)};
}

// Memory [rows, ...] whose rows are contiguous and may be apart; `shape` says what was expected.
void* row_memory(const char* op, const char* name, const Tensor& tensor, const char* shape) {
  int64_t step = 1;
  bool packed = true;
  for (int64_t i = tensor.dim() - 1; i > 0; step *= tensor.size(i), --i) packed = packed && (tensor.size(i) == 1 || tensor.stride(i) == step);
  SPECDEC_CHECK(packed, op, ": ", name, " ", shape_of(tensor), " has rows that are not contiguous; expected ", shape);
  return tensor.mutable_data_ptr();
}

PackedTrees batch_of(const char* op, int64_t capacity, int64_t nodes, const Tensor& rows, const Tensor& lengths) {
  const int64_t batch = rows.dim() == 1 ? rows.size(0) : -1;
  SPECDEC_CHECK(batch >= 0, op, ": rows is ", shape_of(rows), "; expected int32 [B]");
  PackedTrees trees;
  trees.rows = integers(op, "rows", rows, batch);
  trees.lengths = integers(op, "lengths", lengths, batch);
  trees.batch = batch;
  trees.nodes = nodes;
  for (int64_t b = 0; b < batch; ++b) {
    SPECDEC_CHECK(trees.rows[b] >= 0 && trees.rows[b] < capacity, op, ": got rows ", listed(trees.rows, batch), "; expected row ids below ", capacity);
  }
  return trees;
}

PackedTrees trees_of(const char* op, int64_t capacity, int64_t nodes, const Tensor& rows, const Tensor& lengths, const Tensor& offsets,
                     const std::optional<Tensor>& parents, bool advance) {
  PackedTrees trees = batch_of(op, capacity, nodes, rows, lengths);
  trees.offsets = integers(op, "offsets", offsets, trees.batch + 1);
  bool fits = trees.offsets[0] == 0 && trees.offsets[trees.batch] <= nodes;
  for (int64_t b = 0; b < trees.batch; ++b) fits = fits && trees.offsets[b] <= trees.offsets[b + 1];
  SPECDEC_CHECK(fits, op, ": got offsets ", listed(trees.offsets, trees.batch + 1), "; expected non-decreasing offsets from 0 up to ", nodes);
  if (!parents.has_value()) return trees;
  SPECDEC_CHECK(!advance, op, ": got advance and parents; expected chains; commit the path of a tree afterwards");
  SPECDEC_CHECK(parents->dim() == 1 && parents->size(0) >= nodes, op, ": parents is ", shape_of(*parents), "; expected int32 [", nodes, "] or None");
  trees.parents = integers(op, "parents", *parents, parents->size(0));
  for (int64_t b = 0; b < trees.batch; ++b) {
    for (int64_t node = trees.offsets[b]; node < trees.offsets[b + 1]; ++node) {
      const int64_t own = node - trees.offsets[b];
      SPECDEC_CHECK(trees.parents[node] >= -1 && trees.parents[node] < own, op, ": the parent of node ", node, " is ", trees.parents[node],
                    "; expected -1 to ", own - 1);
    }
  }
  return trees;
}

const int32_t* path_of(const char* op, const Tensor& path, const PackedTrees& trees) {
  SPECDEC_CHECK(path.scalar_type() == ScalarType::Int && path.dim() == 2 && path.size(0) == trees.batch && path.is_contiguous(), op, ": path is ",
                described(path), "; expected contiguous int32 [", trees.batch, ", D + 1]");
  const int32_t* nodes = static_cast<const int32_t*>(path.const_data_ptr());
  for (int64_t i = 0; i < path.numel(); ++i) {
    SPECDEC_CHECK(nodes[i] >= -1 && nodes[i] < trees.nodes, op, ": got path ", listed(nodes, path.numel()), "; expected nodes below ", trees.nodes,
                  ", padded with -1");
  }
  return nodes;
}

bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (const int64_t size : sizes)
    if (tensor.size(i++) != size) return false;
  return true;
}

Isa isa_of(const char* op, int64_t isa) {
  SPECDEC_CHECK(isa >= 0 && isa <= 3, op, ": isa is ", isa, ", expected 0 (best), 1 (portable), 2 (AVX2) or 3 (AVX-512)");
  return static_cast<Isa>(isa);
}

// All but query and rate.
Recurrence recurrence_of(const char* op, const Tensor& state, const Tensor& key, const Tensor& value, const Tensor& gate,
                         const std::optional<Tensor>& decay) {
  SPECDEC_CHECK(state.dim() == 4 && state.scalar_type() == ScalarType::Float, op, ": state is ", shape_of(state), "; expected float32 [R, H, K, V]");
  SPECDEC_CHECK(value.dim() == 3, op, ": value is ", shape_of(value), "; expected [M, H, V]");
  Recurrence call;
  const int64_t nodes = call.nodes = value.size(0), heads = call.heads = state.size(1), keys = call.keys = state.size(2), width = call.width = state.size(3);
  SPECDEC_CHECK(key.dim() == 3 && key.size(0) == nodes && key.size(2) == keys && key.size(1) > 0 && heads % key.size(1) == 0, op, ": key is ",
                shape_of(key), "; expected [", nodes, ", G, ", keys, "], where G divides ", heads, " heads");
  call.groups = key.size(1);
  SPECDEC_CHECK(has_sizes(value, {nodes, heads, width}), op, ": value is ", shape_of(value), "; expected [", nodes, ", ", heads, ", ", width, "]");
  if (decay.has_value()) {
    SPECDEC_CHECK(has_sizes(gate, {nodes, heads, width}), op, ": log_gate is ", shape_of(gate), "; expected [", nodes, ", ", heads, ", ", width, "]");
    SPECDEC_CHECK(has_sizes(*decay, {heads, keys, width}), op, ": decay is ", shape_of(*decay), "; expected [", heads, ", ", keys, ", ", width, "]");
    call.decay = operand(op, "decay", *decay);
  } else {
    SPECDEC_CHECK(has_sizes(gate, {nodes, heads}) || has_sizes(gate, {nodes, heads, keys}), op, ": log_gate is ", shape_of(gate), "; expected [",
                  nodes, ", ", heads, "] or [", nodes, ", ", heads, ", ", keys, "]");
  }
  call.kind = decay.has_value() ? Gate::Element : gate.dim() == 2 ? Gate::Head : Gate::Channel;
  call.key = operand(op, "key", key);
  call.value = operand(op, "value", value);
  call.gate = operand(op, "log_gate", gate);
  call.state = static_cast<float*>(row_memory(op, "state", state, "float32 [R, H, K, V]"));
  call.row_stride = state.stride(0);
  return call;
}

std::tuple<Tensor, Tensor> tree_delta(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& log_gate, const Tensor& beta, const Tensor& state, const Tensor& rows,
    const Tensor& lengths, const Tensor& offsets, std::optional<Tensor> parents, bool advance, int64_t isa) {
  constexpr const char* kOp = "tree_delta";
  Recurrence call = recurrence_of(kOp, state, key, value, log_gate, std::nullopt);
  SPECDEC_CHECK(has_sizes(query, {call.nodes, call.groups, call.keys}) && has_sizes(beta, {call.nodes, call.heads}), kOp, ": query is ",
                shape_of(query), " and beta ", shape_of(beta), "; expected ", shape_of(key), " and [", call.nodes, ", ", call.heads, "]");
  call.query = operand(kOp, "query", query);
  call.rate = operand(kOp, "beta", beta);
  const PackedTrees trees = trees_of(kOp, state.size(0), call.nodes, rows, lengths, offsets, parents, advance);
  const Tensor outputs = empty_on_cpu({call.nodes, call.heads, call.width}, dtype_of(value));
  const Tensor corrections = empty({call.nodes, call.heads, call.width}, ScalarType::Float);
  walk_trees(call, trees, advance, outputs.mutable_data_ptr(), static_cast<float*>(corrections.mutable_data_ptr()), isa_of(kOp, isa));
  return {outputs, corrections};
}

Tensor tree_ssm(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& log_gate, const Tensor& state, const Tensor& rows,
    const Tensor& lengths, const Tensor& offsets, std::optional<Tensor> parents, std::optional<Tensor> decay, bool advance, int64_t isa) {
  constexpr const char* kOp = "tree_ssm";
  Recurrence call = recurrence_of(kOp, state, key, value, log_gate, decay);
  SPECDEC_CHECK(has_sizes(query, {call.nodes, call.groups, call.keys}), kOp, ": query is ", shape_of(query), "; expected ", shape_of(key));
  call.query = operand(kOp, "query", query);
  const PackedTrees trees = trees_of(kOp, state.size(0), call.nodes, rows, lengths, offsets, parents, advance);
  const Tensor outputs = empty_on_cpu({call.nodes, call.heads, call.width}, dtype_of(value));
  walk_trees(call, trees, advance, outputs.mutable_data_ptr(), nullptr, isa_of(kOp, isa));
  return outputs;
}

void state_commit(
    const Tensor& state, const Tensor& key, const Tensor& value, const Tensor& log_gate, const Tensor& rows, const Tensor& lengths,
    const Tensor& path, std::optional<Tensor> decay, int64_t isa) {
  constexpr const char* kOp = "state_commit";
  const Recurrence call = recurrence_of(kOp, state, key, value, log_gate, decay);
  const PackedTrees trees = batch_of(kOp, state.size(0), call.nodes, rows, lengths);
  const int32_t* nodes = path_of(kOp, path, trees);
  replay_paths(call, trees, nodes, path.size(1), isa_of(kOp, isa));
}

void check_window(const char* op, const Tensor& inputs, const Tensor& window) {
  SPECDEC_CHECK(inputs.dim() == 2 && window.dim() == 3 && window.size(2) == inputs.size(1), op, ": inputs is ", shape_of(inputs), " and window ",
                shape_of(window), "; expected [M, C] and [R, W - 1, C]");
  SPECDEC_CHECK(inputs.scalar_type() == window.scalar_type(), op, ": inputs and window differ in dtype; expected one");
}

Tensor tree_conv(
    const Tensor& inputs, const Tensor& weight, std::optional<Tensor> bias, const Tensor& window, const Tensor& rows, const Tensor& lengths,
    const Tensor& offsets, std::optional<Tensor> parents, bool silu, bool advance, int64_t isa) {
  constexpr const char* kOp = "tree_conv";
  check_window(kOp, inputs, window);
  Convolution call;
  call.nodes = inputs.size(0);
  call.channels = inputs.size(1);
  call.reach = window.size(1) + 1;
  SPECDEC_CHECK(has_sizes(weight, {call.channels, call.reach}) && (!bias.has_value() || has_sizes(*bias, {call.channels})), kOp, ": weight is ",
                shape_of(weight), "; expected [", call.channels, ", ", call.reach, "], and bias [", call.channels, "] or None");
  call.inputs = operand(kOp, "inputs", inputs);
  call.weight = operand(kOp, "weight", weight);
  if (bias.has_value()) call.bias = operand(kOp, "bias", *bias);
  call.trees = trees_of(kOp, window.size(0), call.nodes, rows, lengths, offsets, parents, advance);
  call.window = row_memory(kOp, "window", window, "[R, W - 1, C]");
  call.row_stride = window.stride(0);
  call.silu = silu;
  call.advance = advance;
  const Tensor outputs = empty_on_cpu({call.nodes, call.channels}, dtype_of(inputs));
  call.outputs = outputs.mutable_data_ptr();
  convolve_trees(call, isa_of(kOp, isa));
  return outputs;
}

void window_commit(const Tensor& window, const Tensor& inputs, const Tensor& rows, const Tensor& lengths, const Tensor& path) {
  constexpr const char* kOp = "window_commit";
  check_window(kOp, inputs, window);
  SPECDEC_CHECK(inputs.is_contiguous(), kOp, ": inputs ", shape_of(inputs), " is not contiguous; expected contiguous [M, C]");
  const Scalar type = scalar_of(inputs, "window_commit: inputs");
  const int64_t size = type == Scalar::Float64 ? 8 : type == Scalar::Float32 ? 4 : 2;
  const PackedTrees trees = batch_of(kOp, window.size(0), inputs.size(0), rows, lengths);
  WindowMoves call;
  call.window = static_cast<char*>(row_memory(kOp, "window", window, "[R, W - 1, C]"));
  call.inputs = static_cast<const char*>(inputs.const_data_ptr());
  call.row_stride = window.stride(0) * size;
  call.channels = inputs.size(1) * size;
  call.held = window.size(1);
  const int32_t* nodes = path_of(kOp, path, trees);
  move_windows(call, trees, nodes, path.size(1));
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "tree_delta(Tensor query, Tensor key, Tensor value, Tensor log_gate, Tensor beta, Tensor(a!) state, Tensor rows, Tensor lengths, "
      "Tensor offsets, Tensor? parents=None, bool advance=False, int isa=0) -> (Tensor, Tensor)");
  m.def(
      "tree_ssm(Tensor query, Tensor key, Tensor value, Tensor log_gate, Tensor(a!) state, Tensor rows, Tensor lengths, Tensor offsets, "
      "Tensor? parents=None, Tensor? decay=None, bool advance=False, int isa=0) -> Tensor");
  m.def(
      "tree_conv(Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) window, Tensor rows, Tensor lengths, Tensor offsets, "
      "Tensor? parents=None, bool silu=False, bool advance=False, int isa=0) -> Tensor");
  m.def(
      "state_commit(Tensor(a!) state, Tensor key, Tensor value, Tensor log_gate, Tensor rows, Tensor lengths, Tensor path, "
      "Tensor? decay=None, int isa=0) -> ()");
  m.def("window_commit(Tensor(a!) window, Tensor inputs, Tensor rows, Tensor lengths, Tensor path) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_delta", TORCH_BOX(&specdec::bindings::tree_delta));
  m.impl("tree_ssm", TORCH_BOX(&specdec::bindings::tree_ssm));
  m.impl("tree_conv", TORCH_BOX(&specdec::bindings::tree_conv));
  m.impl("state_commit", TORCH_BOX(&specdec::bindings::state_commit));
  m.impl("window_commit", TORCH_BOX(&specdec::bindings::window_commit));
}

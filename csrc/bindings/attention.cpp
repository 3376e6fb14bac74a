// torch.ops.specdec.tree_attention, tree_attention_lse and tree_attention_out: schemas and CPU implementation.
#include "attention/tree_attention.h"

#include <optional>
#include <tuple>

#include "bindings/arguments.h"

namespace specdec::bindings {
namespace {

constexpr const char* kOp = "tree_attention";

struct Inputs {
  const Tensor &query, &key_cache, &value_cache, &page_table, &lengths, &offsets;
  const std::optional<Tensor>&ancestors, &depth, &sinks;
  double scale, softcap;
  int64_t window;
};

void check_last_axis(const Tensor& tensor, const char* name) {
  SPECDEC_CHECK(tensor.stride(tensor.dim() - 1) == 1, kOp, ": the last axis of ", name, " has stride ", tensor.stride(tensor.dim() - 1),
                ", expected 1; call .contiguous() on it");
}

AttentionArguments read(const Inputs& in) {
  SPECDEC_CHECK(in.query.dim() == 3, kOp, ": query has shape ", shape_of(in.query), ", expected [M, H, D]");
  AttentionArguments a;
  a.type = scalar_of(in.query, "tree_attention: query");
  a.nodes = in.query.size(0);
  a.heads = in.query.size(1);
  a.head_dim = in.query.size(2);
  a.query = in.query.const_data_ptr();
  a.query_node = in.query.stride(0);
  a.query_head = in.query.stride(1);
  check_last_axis(in.query, "query");

  SPECDEC_CHECK(in.key_cache.dim() == 4 && in.key_cache.size(3) == a.head_dim && in.key_cache.scalar_type() == in.query.scalar_type(), kOp,
                ": key_cache has shape ", shape_of(in.key_cache), ", expected [pages, page_size, kv_heads, ", a.head_dim, "] and the dtype of query");
  a.pages = in.key_cache.size(0);
  a.page_size = in.key_cache.size(1);
  a.kv_heads = in.key_cache.size(2);
  SPECDEC_CHECK(a.page_size >= 1 && a.kv_heads >= 1 && a.heads >= 1 && a.heads % a.kv_heads == 0, kOp, ": query has ", a.heads, " heads for a cache of shape ",
                shape_of(in.key_cache), ", expected a multiple of its number of heads");
  SPECDEC_CHECK(a.head_dim >= 1 && a.head_dim <= kWidestHead, kOp, ": head width is ", a.head_dim, ", expected 1 to ", kWidestHead);
  const Tensor& values = in.value_cache;
  SPECDEC_CHECK(values.dim() == 4 && values.size(0) == a.pages && values.size(1) == a.page_size && values.size(2) == a.kv_heads &&
                    values.size(3) == a.head_dim && values.scalar_type() == in.query.scalar_type(),
                kOp, ": value_cache has shape ", shape_of(values), ", expected shape and dtype of key_cache ", shape_of(in.key_cache));
  check_last_axis(in.key_cache, "key_cache");
  check_last_axis(values, "value_cache");
  a.keys = in.key_cache.const_data_ptr();
  a.values = values.const_data_ptr();
  a.key_page = in.key_cache.stride(0);
  a.key_slot = in.key_cache.stride(1);
  a.key_head = in.key_cache.stride(2);
  a.value_page = values.stride(0);
  a.value_slot = values.stride(1);
  a.value_head = values.stride(2);

  a.rows = in.lengths.numel();
  SPECDEC_CHECK(in.page_table.dim() == 2 && in.page_table.size(0) == a.rows && in.offsets.numel() == a.rows + 1, kOp, ": page_table ",
                shape_of(in.page_table), " and offsets ", shape_of(in.offsets), " do not fit lengths ", shape_of(in.lengths),
                ", expected [B, P], [B + 1] and [B]");
  a.pages_per_row = in.page_table.size(1);
  a.page_table = input<int32_t>(in.page_table, "tree_attention: page_table");
  a.lengths = input<int32_t>(in.lengths, "tree_attention: lengths");
  a.offsets = input<int32_t>(in.offsets, "tree_attention: offsets");
  if (in.ancestors.has_value()) {
    SPECDEC_CHECK(in.ancestors->dim() == 2 && in.ancestors->size(0) == a.nodes && in.ancestors->size(1) >= 1, kOp, ": ancestors has shape ",
                  shape_of(*in.ancestors), ", expected [", a.nodes, ", words]");
    a.words = in.ancestors->size(1);
    a.ancestors = input<int32_t>(*in.ancestors, "tree_attention: ancestors");
  }
  if (in.depth.has_value()) {
    SPECDEC_CHECK(in.depth->numel() == a.nodes, kOp, ": depth has shape ", shape_of(*in.depth), ", expected [", a.nodes, "]");
    a.depth = input<int32_t>(*in.depth, "tree_attention: depth");
  }
  SPECDEC_CHECK(in.window == 0 || a.ancestors == nullptr || a.depth != nullptr, kOp,
                ": window with ancestors needs depth; pass the depth of every node");
  SPECDEC_CHECK(in.window >= 0, kOp, ": window is ", in.window, ", expected 0 (off) or the number of visible positions");
  if (in.sinks.has_value()) {
    SPECDEC_CHECK(in.sinks->numel() == a.heads && in.sinks->is_contiguous(), kOp, ": sinks has shape ", shape_of(*in.sinks), ", expected [", a.heads, "]");
    a.sinks = in.sinks->const_data_ptr();
    a.sink_type = scalar_of(*in.sinks, "tree_attention: sinks");
  }
  a.scale = in.scale;
  a.softcap = in.softcap;
  a.window = in.window;
  return a;
}

void run(const Inputs& in, const Tensor& out, const Tensor* lse, int64_t isa) {
  AttentionArguments a = read(in);
  SPECDEC_CHECK(out.dim() == 3 && out.size(0) == a.nodes && out.size(1) == a.heads && out.size(2) == a.head_dim &&
                    out.scalar_type() == in.query.scalar_type(),
                kOp, ": out has shape ", shape_of(out), ", expected shape and dtype of query ", shape_of(in.query));
  check_last_axis(out, "out");
  a.out = out.mutable_data_ptr();
  a.out_node = out.stride(0);
  a.out_head = out.stride(1);
  if (lse != nullptr) {
    const ScalarType wide = a.type == Scalar::Float64 ? ScalarType::Double : ScalarType::Float;
    SPECDEC_CHECK(lse->numel() == a.nodes * a.heads && lse->is_contiguous() && lse->scalar_type() == wide, kOp, ": lse has shape ",
                  shape_of(*lse), ", expected [", a.nodes, ", ", a.heads, "] of float32 (float64 for float64)");
    a.lse = lse->mutable_data_ptr();
  }
  SPECDEC_CHECK(isa >= 0 && isa <= 3, kOp, ": isa is ", isa, ", expected 0 (best), 1 (portable), 2 (AVX2) or 3 (AVX-512)");
  const AttentionProblem problem = tree_attention(a, static_cast<Isa>(isa));
  if (problem.text != nullptr) {
    reject(kOp, ": ", problem.text, " of row ", problem.row, " is ", problem.got, ", expected 0 <= value < ", problem.limit,
           "; stage the nodes and grow page_table before attention");
  }
}

Tensor empty_like_query(const Tensor& query) {
  SPECDEC_CHECK(query.dim() == 3, kOp, ": query has shape ", shape_of(query), ", expected [M, H, D]");
  return empty_on_cpu({query.size(0), query.size(1), query.size(2)}, dtype_of(query));
}

Tensor attention(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& page_table, const Tensor& lengths,
    const Tensor& offsets, const std::optional<Tensor>& ancestors, const std::optional<Tensor>& depth, double scale, double softcap,
    int64_t window, const std::optional<Tensor>& sinks) {
  const Tensor out = empty_like_query(query);
  run({query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth, sinks, scale, softcap, window}, out, nullptr, 0);
  return out;
}

std::tuple<Tensor, Tensor> attention_lse(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& page_table, const Tensor& lengths,
    const Tensor& offsets, const std::optional<Tensor>& ancestors, const std::optional<Tensor>& depth, double scale, double softcap,
    int64_t window, const std::optional<Tensor>& sinks) {
  const Tensor out = empty_like_query(query);
  const int32_t wide = query.scalar_type() == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const Tensor lse = empty_on_cpu({query.size(0), query.size(1)}, wide);
  run({query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth, sinks, scale, softcap, window}, out, &lse, 0);
  return {out, lse};
}

void attention_out(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& page_table, const Tensor& lengths,
    const Tensor& offsets, const std::optional<Tensor>& ancestors, const std::optional<Tensor>& depth, double scale, double softcap,
    int64_t window, const std::optional<Tensor>& sinks, const Tensor& out,
    const std::optional<Tensor>& lse, int64_t isa) {
  run({query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth, sinks, scale, softcap, window}, out,
      lse.has_value() ? &*lse : nullptr, isa);
}

}  // namespace
}  // namespace specdec::bindings

#define SPECDEC_ATTENTION_INPUTS                                                                                    \
  "Tensor query, Tensor key_cache, Tensor value_cache, Tensor page_table, Tensor lengths, Tensor offsets, "         \
  "Tensor? ancestors, Tensor? depth, float scale, float softcap, int window, Tensor? sinks"

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("tree_attention(" SPECDEC_ATTENTION_INPUTS ") -> Tensor");
  m.def("tree_attention_lse(" SPECDEC_ATTENTION_INPUTS ") -> (Tensor, Tensor)");
  m.def("tree_attention_out(" SPECDEC_ATTENTION_INPUTS ", Tensor(a!) out, Tensor(b!)? lse, int isa=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&specdec::bindings::attention));
  m.impl("tree_attention_lse", TORCH_BOX(&specdec::bindings::attention_lse));
  m.impl("tree_attention_out", TORCH_BOX(&specdec::bindings::attention_out));
}

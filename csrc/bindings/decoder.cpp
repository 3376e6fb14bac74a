// torch.ops.specdec.decoder_pass: schema and CPU implementation. `table` is made by DecoderTable
// (kernels/specdec_kernels/decoder_pass/decoder_table.py), which keeps alive what its addresses name.
#include "decoder/decoder_pass.h"

#include "bindings/arguments.h"

namespace specdec::bindings {
namespace {

constexpr const char* kOp = "decoder_pass";
constexpr int64_t kHeader = 15, kPerLayer = 11;
static_assert(sizeof(DecoderLayer) == kPerLayer * sizeof(int64_t));

Decoder decoder_of(const Tensor& table) {
  const int64_t* entry = input<int64_t>(table, "decoder_pass: table");
  SPECDEC_CHECK(table.dim() == 1 && table.numel() >= kHeader && table.numel() == kHeader + kPerLayer * entry[4], kOp, ": table is ", shape_of(table),
                "; expected one of a DecoderTable");
  const auto floats = [&](int i) { return reinterpret_cast<const float*>(entry[i]); };
  Decoder d{floats(0), floats(1), floats(2), floats(3), reinterpret_cast<const DecoderLayer*>(entry + kHeader)};
  d.layers = entry[4];
  d.vocab = entry[5];
  d.hidden = entry[6];
  d.heads = entry[7];
  d.kv_heads = entry[8];
  d.width = entry[9];
  d.inner = entry[10];
  d.positions = entry[11];
  d.pages = entry[12];
  d.page_size = entry[13];
  SPECDEC_CHECK(d.width <= kWidestHead, kOp, ": heads are ", d.width, " wide; expected at most ", kWidestHead);
  d.head_by_input = entry[14] != 0;
  return d;
}

Tensor decoder_pass_cpu(
    const Tensor& table, const Tensor& tokens, const Tensor& positions, const std::optional<Tensor>& wanted, const Tensor& slots,
    const Tensor& page_table, const Tensor& lengths, const Tensor& offsets, const std::optional<Tensor>& ancestors,
    const std::optional<Tensor>& depth, int64_t vocab_size, double eps, double scale, int64_t isa) {
  Decoder decoder = decoder_of(table);
  SPECDEC_CHECK(decoder.vocab == vocab_size, kOp, ": vocab_size is ", vocab_size, "; expected the table's, ", decoder.vocab);
  decoder.eps = eps;
  decoder.scale = scale;
  DecoderNodes n{};
  n.nodes = tokens.numel();
  n.rows = lengths.numel();
  SPECDEC_CHECK(positions.numel() == n.nodes && slots.numel() == n.nodes, kOp, ": positions are ", shape_of(positions), ", slots ", shape_of(slots),
                "; expected [", n.nodes, "] like tokens");
  SPECDEC_CHECK(page_table.dim() == 2 && page_table.size(0) == n.rows && offsets.numel() == n.rows + 1, kOp, ": page_table ", shape_of(page_table),
                " and offsets ", shape_of(offsets), " do not fit lengths ", shape_of(lengths), "; expected [B, P], [B + 1] and [B]");
  n.tokens = input<int64_t>(tokens, "decoder_pass: tokens");
  n.positions = input<int64_t>(positions, "decoder_pass: positions");
  n.slots = input<int64_t>(slots, "decoder_pass: slots");
  n.page_table = input<int32_t>(page_table, "decoder_pass: page_table");
  n.lengths = input<int32_t>(lengths, "decoder_pass: lengths");
  n.offsets = input<int32_t>(offsets, "decoder_pass: offsets");
  n.pages_per_row = page_table.size(1);
  n.num_wanted = -1;
  if (wanted.has_value()) {
    n.num_wanted = wanted->numel();
    n.wanted = input<int64_t>(*wanted, "decoder_pass: wanted");
  }
  if (ancestors.has_value()) {
    SPECDEC_CHECK(ancestors->dim() == 2 && ancestors->size(0) == n.nodes && ancestors->size(1) >= 1, kOp, ": ancestors are ", shape_of(*ancestors),
                  "; expected [", n.nodes, ", words]");
    n.words = ancestors->size(1);
    n.ancestors = input<int32_t>(*ancestors, "decoder_pass: ancestors");
  }
  if (depth.has_value()) {
    SPECDEC_CHECK(depth->numel() == n.nodes, kOp, ": depth is ", shape_of(*depth), "; expected [", n.nodes, "]");
    n.depth = input<int32_t>(*depth, "decoder_pass: depth");
  }
  SPECDEC_CHECK(isa >= 0 && isa <= 3, kOp, ": isa is ", isa, ", expected 0 (best), 1 (portable), 2 (AVX2) or 3 (AVX-512)");
  const Tensor logits = empty({wanted.has_value() ? n.num_wanted : n.nodes, decoder.vocab}, ScalarType::Float);
  const AttentionProblem problem = decoder_pass(decoder, n, static_cast<float*>(logits.mutable_data_ptr()), static_cast<Isa>(isa));
  if (problem.text != nullptr) {
    reject(kOp, ": ", problem.text, " of row ", problem.row, " is ", problem.got, ", expected 0 <= value < ", problem.limit,
           "; stage the nodes and grow page_table before the pass");
  }
  return logits;
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "decoder_pass(Tensor table, Tensor tokens, Tensor positions, Tensor? wanted, Tensor slots, Tensor page_table, Tensor lengths, "
      "Tensor offsets, Tensor? ancestors, Tensor? depth, int vocab_size, float eps, float scale, int isa=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("decoder_pass", TORCH_BOX(&specdec::bindings::decoder_pass_cpu)); }

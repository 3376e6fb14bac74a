// torch.ops.specdec.{fused_forward, fused_forward_states, draft_chain, draft_chain_dists}: schemas and CPU implementations. `table` comes from
// DecoderTable (kernels/specdec_kernels/ops/fused_forward/decoder_table.py), which owns the memory at its addresses.
#include "decoder/fused_forward.h"

#include <cstring>
#include <tuple>
#include <vector>

#include "bindings/distributions.h"
#include "decoder/draft_chain.h"

namespace specdec::bindings {
namespace {

constexpr const char *kOp = "fused_forward", *kChain = "draft_chain";
constexpr int64_t kHeader = 24, kPerLayer = 28;
static_assert(sizeof(DecoderLayer) == kPerLayer * sizeof(int64_t));

Decoder decoder_of(const Tensor& table, const char* op, int64_t isa) {
  const int64_t* entry = input<int64_t>(table, "table");
  SPECDEC_CHECK(table.dim() == 1 && table.numel() >= kHeader && table.numel() == kHeader + kPerLayer * entry[3], op, ": table is ", shape_of(table),
                "; expected one of a DecoderTable");
  SPECDEC_CHECK(isa >= 0 && isa <= 5, op, ": isa is ", isa, ", expected 0 (best), 1 (portable), 2 (AVX2), 3 (AVX-512), 4 (AVX-512 BF16) or 5 (AMX)");
  const auto tensor = [&](int i) { return reinterpret_cast<const void*>(entry[i]); };
  Decoder d{};
  d.embedding = tensor(0);
  d.norm = tensor(1);
  d.head = tensor(2);
  d.layer = reinterpret_cast<const DecoderLayer*>(entry + kHeader);
  d.layers = entry[3];
  d.vocab = entry[4];
  d.hidden = entry[5];
  d.heads = entry[6];
  d.kv_heads = entry[7];
  d.width = entry[8];
  d.inner = entry[9];
  d.positions = entry[10];
  d.pages = entry[11];
  d.page_size = entry[12];
  SPECDEC_CHECK(d.width <= kWidestHead, op, ": heads are ", d.width, " wide; expected at most ", kWidestHead);
  d.head_by_input = entry[13] != 0;
  d.activation = static_cast<Activation>(entry[14]);
  double* const numbers[] = {&d.eps, &d.scale, &d.softcap, &d.logits_softcap, &d.embedding_scale, &d.norm_offset};
  for (int i = 0; i < 6; ++i) std::memcpy(numbers[i], entry + 15 + i, sizeof(double));
  d.type = entry[21] != 0 ? Scalar::BFloat16 : Scalar::Float32;
  d.by_input = entry[22] != 0;
  d.head_scale = reinterpret_cast<const float*>(entry[23]);
  return d;
}

// The logits, and the hidden states if `states` are given.
std::tuple<Tensor, Maybe> run_decoder(
    const Tensor& table, const Tensor& tokens, const Tensor& positions, const Maybe& wanted, const Tensor& slots, const Tensor& page_table,
    const Tensor& lengths, const Tensor& offsets, const Maybe& ancestors, const Maybe& depth, const Maybe& states, int64_t vocab_size, bool bfloat16,
    int64_t isa) {
  const Decoder decoder = decoder_of(table, kOp, isa);
  SPECDEC_CHECK(decoder.vocab == vocab_size, kOp, ": vocab_size is ", vocab_size, "; expected the table's, ", decoder.vocab);
  SPECDEC_CHECK(bfloat16 == (decoder.type == Scalar::BFloat16), kOp, ": bfloat16 is ", bfloat16, "; expected the table's type");
  DecoderNodes n{};
  n.nodes = tokens.numel();
  n.rows = lengths.numel();
  SPECDEC_CHECK(positions.numel() == n.nodes && slots.numel() == n.nodes, kOp, ": positions are ", shape_of(positions), ", slots ", shape_of(slots),
                "; expected [", n.nodes, "] like tokens");
  SPECDEC_CHECK(page_table.dim() == 2 && page_table.size(0) == n.rows && offsets.numel() == n.rows + 1, kOp, ": page_table ", shape_of(page_table),
                " and offsets ", shape_of(offsets), " do not fit lengths ", shape_of(lengths), "; expected [B, P], [B + 1] and [B]");
  n.tokens = input<int64_t>(tokens, "fused_forward: tokens");
  n.positions = input<int64_t>(positions, "fused_forward: positions");
  n.slots = input<int64_t>(slots, "fused_forward: slots");
  n.page_table = input<int32_t>(page_table, "fused_forward: page_table");
  n.lengths = input<int32_t>(lengths, "fused_forward: lengths");
  n.offsets = input<int32_t>(offsets, "fused_forward: offsets");
  n.pages_per_row = page_table.size(1);
  n.num_wanted = -1;
  if (wanted.has_value()) {
    n.num_wanted = wanted->numel();
    n.wanted = input<int64_t>(*wanted, "fused_forward: wanted");
  }
  if (ancestors.has_value()) {
    SPECDEC_CHECK(ancestors->dim() == 2 && ancestors->size(0) == n.nodes && ancestors->size(1) >= 1, kOp, ": ancestors are ", shape_of(*ancestors),
                  "; expected [", n.nodes, ", words]");
    n.words = ancestors->size(1);
    n.ancestors = input<int32_t>(*ancestors, "fused_forward: ancestors");
  }
  if (depth.has_value()) {
    SPECDEC_CHECK(depth->numel() == n.nodes, kOp, ": depth is ", shape_of(*depth), "; expected [", n.nodes, "]");
    n.depth = input<int32_t>(*depth, "fused_forward: depth");
  }
  const int64_t rows = wanted.has_value() ? n.num_wanted : n.nodes;
  const auto made = [&](std::initializer_list<int64_t> shape) {
    return bfloat16 ? empty_on_cpu(shape, aoti_torch_dtype_bfloat16()) : empty(shape, ScalarType::Float);
  };
  Maybe hidden;
  if (states.has_value()) {
    n.num_states = states->numel();
    n.states = input<int64_t>(*states, "fused_forward: states");
    hidden = made({n.num_states, n.nodes, decoder.hidden});
    n.hidden = hidden->mutable_data_ptr();
  }
  const Tensor logits = made({rows, decoder.vocab});
  const AttentionProblem problem = fused_forward(decoder, n, logits.mutable_data_ptr(), static_cast<Isa>(isa));
  if (problem.text != nullptr) {
    reject(kOp, ": ", problem.text, " of row ", problem.row, " is ", problem.got, ", expected 0 <= value < ", problem.limit,
           "; stage the nodes and grow page_table before the pass");
  }
  return {logits, hidden};
}

Tensor fused_forward_cpu(
    const Tensor& table, const Tensor& tokens, const Tensor& positions, const Maybe& wanted, const Tensor& slots, const Tensor& page_table,
    const Tensor& lengths, const Tensor& offsets, const Maybe& ancestors, const Maybe& depth, int64_t vocab_size, bool bfloat16, int64_t isa) {
  return std::get<0>(run_decoder(table, tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth, {}, vocab_size, bfloat16, isa));
}

std::tuple<Tensor, Tensor> fused_forward_states_cpu(
    const Tensor& table, const Tensor& tokens, const Tensor& positions, const Maybe& wanted, const Tensor& slots, const Tensor& page_table,
    const Tensor& lengths, const Tensor& offsets, const Maybe& ancestors, const Maybe& depth, const Tensor& states, int64_t vocab_size,
    int64_t hidden_size, bool bfloat16, int64_t isa) {
  const auto [logits, hidden] =
      run_decoder(table, tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth, states, vocab_size, bfloat16, isa);
  SPECDEC_CHECK(hidden->size(2) == hidden_size, kOp, ": hidden_size is ", hidden_size, "; expected the table's, ", hidden->size(2));
  return {logits, *hidden};
}

// The arguments of both chain operators.
struct ChainArguments {
  Tensor table, tokens, offsets, drafts, rows, page_table, lengths;
  Maybe temperature;
  Tensor top_k, top_p, min_p, seeds, positions;
};

struct ChainTensors {
  Tensor drafted, logits, inv_t, lse, cut, tie_id, mass;
};

// dist_rows: rows of distributions to return, or with first_draw < 0 the rows of one level.
ChainTensors chain(const ChainArguments& a, int64_t first_draw, int64_t depth, int64_t dist_rows, int64_t vocab, int64_t isa) {
  const Decoder decoder = decoder_of(a.table, kChain, isa);
  SPECDEC_CHECK(decoder.type == Scalar::Float32, kChain, ": the decoder is bfloat16; expected float32");
  ChainRows r{};
  r.batch = a.rows.numel();
  r.nodes = a.tokens.numel();
  SPECDEC_CHECK(a.page_table.dim() == 2 && a.lengths.numel() == a.page_table.size(0) && a.offsets.numel() == r.batch + 1 && depth >= 1, kChain,
                ": page_table ", shape_of(a.page_table), ", lengths ", shape_of(a.lengths), " and offsets ", shape_of(a.offsets), " do not fit ", r.batch,
                " rows; expected [R, P], [R] and [B + 1]");
  SPECDEC_CHECK(vocab >= 1 && vocab <= decoder.vocab, kChain, ": vocab_size is ", vocab, "; expected 1..", decoder.vocab);
  r.capacity = a.page_table.size(0);
  r.pages_per_row = a.page_table.size(1);
  r.tokens = input<int64_t>(a.tokens, "draft_chain: tokens");
  r.offsets = input<int32_t>(a.offsets, "draft_chain: offsets");
  r.drafts = vector<int32_t>(a.drafts, r.batch, "draft_chain: drafts");
  r.rows = input<int32_t>(a.rows, "draft_chain: rows");
  r.page_table = input<int32_t>(a.page_table, "draft_chain: page_table");
  r.lengths = output<int32_t>(a.lengths, "draft_chain: lengths");
  int64_t kept = 0, row = 0;
  for (int64_t b = 0; b < r.batch; ++b) kept += r.drafts[b];
  SPECDEC_CHECK(dist_rows == (first_draw < 0 ? r.batch : kept), kChain, ": ", dist_rows, " rows of distributions; expected ", kept, ", the number of drafts");
  const std::vector<float> zeros(static_cast<size_t>(r.batch), 0.0F);
  const ChainPicks picks{{a.temperature.has_value() ? vector<float>(*a.temperature, r.batch, "draft_chain: temperature") : zeros.data(),
                          vector<int32_t>(a.top_k, r.batch, "draft_chain: top_k"), vector<float>(a.top_p, r.batch, "draft_chain: top_p"),
                          vector<float>(a.min_p, r.batch, "draft_chain: min_p")},
                         vector<int64_t>(a.seeds, r.batch, "draft_chain: seeds"),
                         vector<int32_t>(a.positions, r.batch, "draft_chain: positions"),
                         vocab,
                         first_draw};
  const char* bad = invalid_parameter(picks.sampling, r.batch, &row);
  SPECDEC_CHECK(bad == nullptr, kChain, ": ", bad, "[", row, "] is out of range");
  const auto floats = [&](int64_t width) { return width == 0 ? empty({dist_rows}, ScalarType::Float) : empty({dist_rows, width}, ScalarType::Float); };
  const ChainTensors out{empty({r.batch, depth}, ScalarType::Long), floats(decoder.vocab), floats(0), floats(0), floats(0),
                         empty({dist_rows}, ScalarType::Int), floats(first_draw < 0 ? 1 : block_count(vocab))};
  const ChainDistributions dists{data<float>(out.logits), data<float>(out.inv_t), data<float>(out.lse),
                       data<float>(out.cut),    first_draw < 0 ? nullptr : data<float>(out.mass), data<int32_t>(out.tie_id)};
  const AttentionProblem problem = draft_chain(decoder, r, picks, depth, data<int64_t>(out.drafted), dists, static_cast<Isa>(isa));
  if (problem.text != nullptr) {
    reject(kChain, ": ", problem.text, " of row ", problem.row, " of the batch is ", problem.got, ", expected 0 <= value < ", problem.limit,
           "; reserve pages for what is fed and drafted before the chain");
  }
  return out;
}

Tensor draft_chain_cpu(
    Tensor table, Tensor tokens, Tensor offsets, Tensor drafts, Tensor rows, Tensor page_table, Tensor lengths, Maybe temperature, Tensor top_k,
    Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int64_t depth, int64_t vocab_size, int64_t isa) {
  const int64_t batch = rows.numel();
  return chain({table, tokens, offsets, drafts, rows, page_table, lengths, temperature, top_k, top_p, min_p, seeds, positions}, -1, depth, batch,
               vocab_size, isa)
      .drafted;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> draft_chain_dists_cpu(
    Tensor table, Tensor tokens, Tensor offsets, Tensor drafts, Tensor rows, Tensor page_table, Tensor lengths, Maybe temperature, Tensor top_k,
    Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int64_t first_draw, int64_t depth, int64_t num_drafts, int64_t vocab_size,
    int64_t table_vocab, int64_t isa) {
  SPECDEC_CHECK(first_draw >= 0 && depth >= 1 && first_draw < (int64_t{1} << 31) - depth, kChain, ": first_draw is ", first_draw,
                "; expected 0 to 2**31");
  const ChainTensors out = chain({table, tokens, offsets, drafts, rows, page_table, lengths, temperature, top_k, top_p, min_p, seeds, positions},
                                 first_draw, depth, num_drafts, vocab_size, isa);
  SPECDEC_CHECK(out.logits.size(1) == table_vocab, kChain, ": table_vocab is ", table_vocab, "; expected the table's, ", out.logits.size(1));
  return {out.drafted, out.logits, out.inv_t, out.lse, out.cut, out.tie_id, out.mass};
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "fused_forward(Tensor table, Tensor tokens, Tensor positions, Tensor? wanted, Tensor slots, Tensor page_table, Tensor lengths, "
      "Tensor offsets, Tensor? ancestors, Tensor? depth, int vocab_size, bool bfloat16, int isa=0) -> Tensor");
  m.def(
      "fused_forward_states(Tensor table, Tensor tokens, Tensor positions, Tensor? wanted, Tensor slots, Tensor page_table, Tensor lengths, "
      "Tensor offsets, Tensor? ancestors, Tensor? depth, Tensor states, int vocab_size, int hidden_size, bool bfloat16, int isa=0) "
      "-> (Tensor, Tensor)");
  m.def(
      "draft_chain(Tensor table, Tensor tokens, Tensor offsets, Tensor drafts, Tensor rows, Tensor page_table, Tensor(a!) lengths, "
      "Tensor? temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int depth, int vocab_size, "
      "int isa=0) -> Tensor");
  m.def(
      "draft_chain_dists(Tensor table, Tensor tokens, Tensor offsets, Tensor drafts, Tensor rows, Tensor page_table, Tensor(a!) lengths, "
      "Tensor? temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions, int first_draw, int depth, "
      "int num_drafts, int vocab_size, int table_vocab, int isa=0) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("fused_forward", TORCH_BOX(&specdec::bindings::fused_forward_cpu));
  m.impl("fused_forward_states", TORCH_BOX(&specdec::bindings::fused_forward_states_cpu));
  m.impl("draft_chain", TORCH_BOX(&specdec::bindings::draft_chain_cpu));
  m.impl("draft_chain_dists", TORCH_BOX(&specdec::bindings::draft_chain_dists_cpu));
}

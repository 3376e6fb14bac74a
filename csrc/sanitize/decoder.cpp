// fused_forward and draft_chain.
#include "decoder/fused_forward.h"
#include "decoder/draft_chain.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sanitize/random_inputs.h"

namespace specdec::sanitize {
namespace {

// draft_chain after the rows of a pass, and the rejection of invalid arguments. d: a decoder with free slots in its caches;
// n: the rows' tokens, at least one in the last row; length: committed tokens of every cache row.
void chain_case(uint64_t seed, Random& random, const Decoder& d, const DecoderNodes& n, std::vector<int32_t> length) {
  std::vector<int32_t> offsets{0}, drafts, rows, positions, top_k;
  std::vector<int64_t> tokens, seeds;
  std::vector<float> temperature, top_p, min_p;
  int64_t depth = 0, kept = 0;
  for (int64_t b = 0; b < n.rows; ++b) {
    const int64_t fed = n.offsets[b + 1] - n.offsets[b];
    if (fed == 0) continue;
    for (int64_t i = 0; i < fed; ++i) tokens.push_back(n.tokens[n.offsets[b] + i]);
    const int64_t free_slots = std::min(n.pages_per_row * d.page_size, d.positions) - length[b] - fed;
    offsets.push_back(static_cast<int32_t>(tokens.size()));
    rows.push_back(static_cast<int32_t>(b));
    drafts.push_back(static_cast<int32_t>(between(random, 1, std::min<int64_t>(free_slots + 1, 5))));
    depth = std::max<int64_t>(depth, drafts.back());
    kept += drafts.back();
    temperature.push_back(seed % 4 == 0 ? 0.0F : one_of<float>(random, {0.0F, 0.7F, 1.0F}));
    top_k.push_back(one_of<int32_t>(random, {0, 0, 3}));
    top_p.push_back(one_of<float>(random, {1.0F, 1.0F, 0.8F}));
    min_p.push_back(one_of<float>(random, {0.0F, 0.0F, 0.1F}));
    seeds.push_back(between(random, 0, 1 << 30));
    positions.push_back(length[b]);
  }
  const int64_t batch = static_cast<int64_t>(rows.size());
  ChainRows r{};
  r.tokens = tokens.data();
  r.offsets = offsets.data();
  r.drafts = drafts.data();
  r.rows = rows.data();
  r.page_table = n.page_table;
  r.batch = batch;
  r.nodes = static_cast<int64_t>(tokens.size());
  r.capacity = n.rows;
  r.pages_per_row = n.pages_per_row;
  ChainPicks p{{temperature.data(), top_k.data(), top_p.data(), min_p.data()}, seeds.data(), positions.data(),
               between(random, 1, d.vocab), seed % 2 == 0 ? -1 : between(random, 0, 3)};
  const int64_t dists = p.first_draw < 0 ? batch : kept;
  std::vector<int64_t> first;
  for (int run = 0; run < 2; ++run) {
    const Block logits(Scalar::Float32, dists * d.vocab), inv_t(Scalar::Float32, dists), lse(Scalar::Float32, dists), cut(Scalar::Float32, dists),
        mass(Scalar::Float32, dists * block_count(p.vocab));
    std::vector<int32_t> tie(dists), held = length;
    std::vector<int64_t> drafted(batch * depth);
    const auto floats = [](const Block& block) { return static_cast<float*>(block.data()); };
    const ChainDistributions out{floats(logits), floats(inv_t), floats(lse), floats(cut), p.first_draw < 0 ? nullptr : floats(mass), tie.data()};
    r.lengths = held.data();
    expect(draft_chain(d, r, p, depth, drafted.data(), out).text == nullptr, "draft_chain", seed);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t level = 0; level < depth; ++level) {
        const int64_t token = drafted[b * depth + level];
        expect(level < drafts[b] ? token >= 0 && token < p.vocab : token == -1, "a drafted token", seed);
      }
      expect(held[rows[b]] == length[rows[b]] + offsets[b + 1] - offsets[b] + drafts[b] - 1, "a length after a chain", seed);
    }
    if (first.empty()) first = drafted;
    expect(first == drafted, "a repeated chain", seed);
    const auto expect_rejected = [&](int64_t& number, int64_t wrong) {
      const int64_t before = std::exchange(number, wrong);
      const std::vector<int32_t> same = held;
      expect(draft_chain(d, r, p, depth, drafted.data(), out).text != nullptr && held == same, "the rejection of a chain's arguments", seed);
      number = before;
    };
    expect_rejected(tokens.back(), d.vocab);
    expect_rejected(tokens.front(), -1);
    expect_rejected(r.capacity, rows.back());
    expect_rejected(r.nodes, r.nodes - 1);
    expect_rejected(r.pages_per_row, 0);
  }
}

}  // namespace

void decoder_case(uint64_t seed) {
  Random random(seed);
  Decoder d{};
  d.layers = between(random, 1, 2);
  d.vocab = between(random, 1, 40);
  d.hidden = one_of<int64_t>(random, {1, 16, 33});
  d.kv_heads = between(random, 1, 2);
  d.heads = d.kv_heads * between(random, 1, 2);
  d.width = one_of<int64_t>(random, {2, 6, 32, 40});
  d.inner = one_of<int64_t>(random, {1, 16, 50});
  d.page_size = one_of<int64_t>(random, {1, 7, 16});
  d.eps = 1e-5;
  d.scale = 0.3;
  d.head_by_input = seed % 3 == 0;
  d.type = seed % 3 == 1 ? Scalar::BFloat16 : Scalar::Float32;
  d.by_input = seed / 3 % 3 != 1;
  const bool int8 = seed % 7 == 2;  // int8 weights, which are stored by output
  if (int8) d.by_input = d.head_by_input = false;
  const bool is_float = d.type == Scalar::Float32;

  const int64_t rows = between(random, 1, 3);
  std::vector<int32_t> offsets{0}, lengths, table;
  DecoderNodes n{};
  for (int64_t b = 0; b < rows; ++b) {
    lengths.push_back(static_cast<int32_t>(between(random, 0, 40)));
    const int64_t count = seed % 5 == 0 && b == 0 ? 70 : between(random, b + 1 == rows, 6);
    offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    n.pages_per_row = std::max(n.pages_per_row, (lengths.back() + count + d.page_size - 1) / d.page_size);
  }
  n.pages_per_row = std::max<int64_t>(n.pages_per_row, 1);
  n.rows = rows;
  n.nodes = offsets.back();
  n.num_wanted = -1;
  d.pages = rows * n.pages_per_row + 1;
  d.positions = 120;
  for (int64_t p = 1; p < d.pages; ++p) table.push_back(static_cast<int32_t>(p));
  std::shuffle(table.begin(), table.end(), random);
  std::vector<int64_t> tokens, positions, slots, wanted;
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t i = 0; i < offsets[b + 1] - offsets[b]; ++i) {
      const int64_t place = lengths[b] + i;
      tokens.push_back(between(random, 0, d.vocab - 1));
      positions.push_back(place);
      slots.push_back(table[b * n.pages_per_row + place / d.page_size] * d.page_size + place % d.page_size);
    }
  }
  for (int64_t i = between(random, 0, 4); i > 0; --i) wanted.push_back(between(random, 0, n.nodes - 1));
  if (seed % 2) {
    n.wanted = wanted.data();
    n.num_wanted = static_cast<int64_t>(wanted.size());
  }
  n.tokens = tokens.data();
  n.positions = positions.data();
  n.slots = slots.data();
  n.page_table = table.data();
  n.lengths = lengths.data();
  n.offsets = offsets.data();

  std::vector<Block> blocks;
  const auto values = [&](int64_t count) {
    blocks.emplace_back(d.type, count, random);
    return blocks.back().data();
  };
  std::vector<std::vector<int8_t>> bytes;
  std::vector<std::vector<float>> scales;
  const auto matrix = [&](int64_t inputs, int64_t outputs, const float*& scale) -> const void* {
    if (!int8) return values(inputs * outputs);
    bytes.emplace_back(inputs * outputs);
    for (int8_t& value : bytes.back()) value = static_cast<int8_t>(between(random, -127, 127));
    scales.emplace_back(outputs);
    for (float& value : scales.back()) value = static_cast<float>(between(random, 1, 9)) / 256;
    scale = scales.back().data();
    return bytes.back().data();
  };
  d.embedding = values(d.vocab * d.hidden);
  d.norm = values(d.hidden);
  d.head = matrix(d.hidden, d.vocab, d.head_scale);
  // half of the decoders are Llamas; the others have some of what DecoderLayer allows beyond
  const auto sometimes = [&](int64_t count) { return seed / 2 % 2 == 0 || between(random, 0, 1) == 0 ? nullptr : values(count); };
  const bool more = seed / 2 % 2 != 0;
  d.activation = more ? one_of<Activation>(random, {Activation::Silu, Activation::GeluTanh}) : Activation::Silu;
  d.softcap = more ? one_of<double>(random, {0.0, 2.0}) : 0.0;
  d.logits_softcap = more ? one_of<double>(random, {0.0, 5.0}) : 0.0;
  d.embedding_scale = more ? 4.0 : 1.0;
  d.norm_offset = more ? one_of<double>(random, {0.0, 1.0}) : 0.0;
  const void* const rotary[] = {values(d.positions * d.width), values(d.positions * d.width)};
  std::vector<DecoderLayer> layers;
  for (int64_t l = 0; l < d.layers; ++l) {
    const int64_t cache = d.pages * d.page_size * d.kv_heads * d.width, attended = d.heads * d.width;
    const int64_t keys = d.kv_heads * d.width;
    DecoderLayer layer{};
    layer.norm = values(d.hidden);
    layer.query = matrix(d.hidden, attended, layer.query_scale);
    layer.key = matrix(d.hidden, keys, layer.key_scale);
    layer.value = matrix(d.hidden, keys, layer.value_scale);
    layer.out = matrix(attended, d.hidden, layer.out_scale);
    layer.mlp_norm = values(d.hidden);
    layer.gate = matrix(d.hidden, d.inner, layer.gate_scale);
    layer.up = matrix(d.hidden, d.inner, layer.up_scale);
    layer.down = matrix(d.inner, d.hidden, layer.down_scale);
    layer.query_bias = sometimes(attended);
    layer.key_bias = sometimes(keys);
    layer.value_bias = sometimes(keys);
    layer.out_bias = sometimes(d.hidden);
    if (d.width > 2) {  // a norm over two numbers amplifies rounding errors
      layer.query_norm = sometimes(d.width);
      layer.key_norm = sometimes(d.width);
    }
    layer.post_norm = sometimes(d.hidden);
    layer.mlp_post_norm = sometimes(d.hidden);
    layer.rotary = rotary[more ? l % 2 : 0];
    layer.keys = values(cache);
    layer.values = values(cache);
    layer.window = more ? one_of<int64_t>(random, {0, 9}) : 0;
    layers.push_back(layer);
  }
  d.layer = layers.data();

  const int64_t rows_out = n.num_wanted < 0 ? n.nodes : n.num_wanted;
  const size_t logits_bytes = static_cast<size_t>(rows_out * d.vocab) * (is_float ? sizeof(float) : sizeof(BFloat16));
  std::vector<double> first;
  for (Isa isa : {Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx}) {
    const Block out(d.type, rows_out * d.vocab), beside(d.type, rows_out * d.vocab), hidden(d.type, 3 * n.nodes * d.hidden);
    expect(fused_forward(d, n, out.data(), isa).text == nullptr, "fused_forward", seed);
    for (int64_t i = 0; i < rows_out * d.vocab && isa == Isa::Portable; ++i) first.push_back(out.get(i));
    // A norm over one number is its sign, and weights are not scaled, so rounding errors may grow.
    for (size_t i = 0; i < first.size() && is_float && d.hidden > 1; ++i) {
      expect(std::abs(first[i] - out.get(static_cast<int64_t>(i))) <= 2e-3 * (1 + std::abs(first[i])), "decoder logits", seed);
    }

    // With hidden states: the same bits.
    const int64_t states[] = {d.layers + 1, 0, d.layers};
    DecoderNodes stated = n;
    stated.states = states;
    stated.num_states = static_cast<int64_t>(seed % 4);
    stated.hidden = hidden.data();
    expect(fused_forward(d, stated, beside.data(), isa).text == nullptr, "fused_forward with states", seed);
    expect(rows_out == 0 || std::memcmp(out.data(), beside.data(), logits_bytes) == 0, "logits beside states", seed);

    // The last row alone: the same bits.
    DecoderNodes alone = n;
    const int64_t begin = offsets[rows - 1];
    const std::vector<int32_t> own{0, offsets[rows] - static_cast<int32_t>(begin)};
    alone.nodes = own[1];
    alone.num_wanted = -1;
    alone.rows = 1;
    alone.tokens += begin;
    alone.positions += begin;
    alone.slots += begin;
    alone.page_table += (rows - 1) * n.pages_per_row;
    alone.lengths += rows - 1;
    alone.offsets = own.data();
    const Block one(d.type, alone.nodes * d.vocab);
    expect(fused_forward(d, alone, one.data(), isa).text == nullptr, "fused_forward of a row", seed);
    for (int64_t i = 0; i < rows_out; ++i) {
      const int64_t node = n.num_wanted < 0 ? i : n.wanted[i];
      if (node < begin) continue;
      const size_t row_bytes = logits_bytes / static_cast<size_t>(rows_out);
      const char *together = static_cast<const char*>(out.data()) + i * row_bytes, *by_itself = static_cast<const char*>(one.data()) + (node - begin) * row_bytes;
      expect(std::memcmp(together, by_itself, row_bytes) == 0, "a row of a decoder alone", seed);
    }
  }

  if (is_float) chain_case(seed, random, d, n, lengths);

  // Arguments that must be rejected before any memory access.
  const Block unwritten(d.type, rows_out * d.vocab);
  const auto expect_rejected = [&](std::vector<int64_t>& numbers, int64_t wrong) {
    const int64_t before = std::exchange(numbers.back(), wrong);
    expect(fused_forward(d, n, unwritten.data()).text != nullptr, "the rejection of a decoder's arguments", seed);
    numbers.back() = before;
  };
  expect_rejected(tokens, d.vocab);
  expect_rejected(tokens, -1);
  expect_rejected(positions, d.positions);
  expect_rejected(slots, d.pages * d.page_size);
  if (n.num_wanted > 0) expect_rejected(wanted, n.nodes);
}

}  // namespace specdec::sanitize

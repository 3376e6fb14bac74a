// tree_attention against float64 loops, on every instruction set.
#include "attention/tree_attention.h"

#include <algorithm>
#include <cmath>

#include "sanitize/random_inputs.h"
#include "trees/tree.h"

namespace specdec::sanitize {

void attention_case(uint64_t seed) {
  Random random(seed);
  const bool large = seed % 8 == 0;  // wide tiles, several chunks, threads
  const Trees trees(random, between(random, 1, 3), large ? 100 : 9);
  const int64_t tail = between(random, 0, 2);
  AttentionArguments a;
  a.nodes = trees.nodes() + tail;
  a.rows = trees.rows();
  a.kv_heads = between(random, 1, 2);
  a.heads = a.kv_heads * between(random, 1, 3);
  a.head_dim = one_of<int64_t>(random, {1, 8, 24, 32, 33, 64, 72});
  a.page_size = one_of<int64_t>(random, {1, 7, 16, 256});
  a.scale = 0.3;
  a.softcap = one_of<double>(random, {0, 0, 3});
  a.window = one_of<int64_t>(random, {0, 0, 5, 70});
  a.offsets = trees.offsets.data();

  std::vector<int32_t> lengths, table;
  for (int64_t b = 0; b < a.rows; ++b) {
    lengths.push_back(static_cast<int32_t>(between(random, 0, large ? 1200 : 90)));
    a.pages_per_row = std::max(a.pages_per_row, (lengths.back() + trees.offsets[b + 1] - trees.offsets[b] + a.page_size - 1) / a.page_size);
  }
  a.pages = a.rows * a.pages_per_row + 1;
  for (int64_t p = 1; p < a.pages; ++p) table.push_back(static_cast<int32_t>(p));
  std::shuffle(table.begin(), table.end(), random);
  a.lengths = lengths.data();
  a.page_table = table.data();

  int64_t widest = 1;
  for (int64_t b = 0; b < a.rows; ++b) widest = std::max<int64_t>(widest, trees.offsets[b + 1] - trees.offsets[b]);
  a.words = (widest + 31) / 32;
  std::vector<int32_t> depth(a.nodes), row(a.nodes), ancestors(a.nodes * a.words), child(a.nodes), sibling(a.nodes), parents(trees.parents);
  parents.resize(a.nodes, -1);
  expect(tree_plan(parents.data(), a.nodes, a.offsets, a.rows, {depth.data(), row.data(), ancestors.data(), child.data(), sibling.data(), a.words}) == -1,
         "tree_plan", seed);
  if (seed % 3 != 0) {
    a.ancestors = ancestors.data();
    a.depth = depth.data();
  }

  const int64_t queries = a.nodes * a.heads * a.head_dim, slots = a.pages * a.page_size * a.kv_heads * a.head_dim;
  a.query_node = a.out_node = a.heads * a.head_dim;
  a.query_head = a.out_head = a.head_dim;
  a.key_page = a.value_page = a.page_size * a.kv_heads * a.head_dim;
  a.key_slot = a.value_slot = seed % 2 ? a.kv_heads * a.head_dim : a.head_dim;  // also head-first caches
  a.key_head = a.value_head = seed % 2 ? a.head_dim : a.page_size * a.head_dim;

  const Scalar type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half});
  const Block query(type, queries, random), keys(type, slots, random), values(type, slots, random);
  const Block sinks(Scalar::BFloat16, a.heads, random);
  if (seed % 4 == 1) {
    a.sinks = sinks.data();
    a.sink_type = Scalar::BFloat16;
  }
  // The same values in float64, computed by the plain loops.
  Block exact_query(Scalar::Float64, queries), exact_keys(Scalar::Float64, slots), exact_values(Scalar::Float64, slots);
  for (int64_t i = 0; i < queries; ++i) exact_query.set(i, query.get(i));
  for (int64_t i = 0; i < slots; ++i) {
    exact_keys.set(i, keys.get(i));
    exact_values.set(i, values.get(i));
  }
  const Block exact_out(Scalar::Float64, queries), exact_lse(Scalar::Float64, a.nodes * a.heads);
  AttentionArguments exact = a;
  exact.type = Scalar::Float64;
  exact.query = exact_query.data();
  exact.keys = exact_keys.data();
  exact.values = exact_values.data();
  exact.out = exact_out.data();
  exact.lse = exact_lse.data();
  expect(tree_attention(exact).text == nullptr, "float64 tree_attention", seed);

  a.type = type;
  a.query = query.data();
  a.keys = keys.data();
  a.values = values.data();
  for (Isa isa : {Isa::Portable, Isa::Avx2, Isa::Avx512}) {
    const Block out(type, queries), lse(Scalar::Float32, a.nodes * a.heads);
    a.out = out.data();
    a.lse = lse.data();
    expect(tree_attention(a, isa).text == nullptr, "tree_attention", seed);
    const double tolerance = type == Scalar::Float32 ? 1e-5 : type == Scalar::Half ? 5e-3 : 4e-2;
    for (int64_t i = 0; i < queries; ++i) expect(std::abs(out.get(i) - exact_out.get(i)) <= tolerance, "attention output", seed);
    for (int64_t i = 0; i < a.nodes * a.heads; ++i) {
      const double x = lse.get(i), y = exact_lse.get(i);
      expect(x == y || std::abs(x - y) <= 1e-4, "attention log-sum-exp", seed);
    }
  }

  // Arguments that must be rejected before any memory access.
  if (a.rows > 0 && trees.nodes() > 0) {
    std::vector<int32_t> bad = table;
    std::fill(bad.begin(), bad.end(), static_cast<int32_t>(a.pages));
    a.page_table = bad.data();
    expect(tree_attention(a).text != nullptr, "the rejection of invalid pages", seed);
  }
}

}  // namespace specdec::sanitize

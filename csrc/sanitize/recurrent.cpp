// tree_delta, tree_ssm, tree_conv and the commits, with the bits of one node at a time.
#include <algorithm>
#include <cstring>

#include "recurrent/convolution.h"
#include "recurrent/recurrence.h"
#include "sanitize/random_inputs.h"

namespace specdec::sanitize {

namespace {

// Rows of a batch in another order than their texts, and lengths of which some are 0.
struct Texts {
  std::vector<int32_t> rows, lengths;

  Texts(Random& random, int64_t count) {
    for (int64_t b = 0; b < count; ++b) {
      rows.push_back(static_cast<int32_t>(b));
      lengths.push_back(static_cast<int32_t>(between(random, 0, 1) * 5));
    }
    std::shuffle(rows.begin(), rows.end(), random);
  }
  PackedTrees packed(const Trees& trees, int64_t tail, bool chains) const {
    return {rows.data(), lengths.data(), trees.offsets.data(), chains ? nullptr : trees.parents.data(), trees.rows(), trees.nodes() + tail};
  }
};

// Packed nodes from the root to a node of request b, and one place that stays empty.
std::vector<int32_t> path_to(const Trees& trees, int64_t b, int64_t node) {
  std::vector<int32_t> path{-1};
  for (; node >= 0; node = trees.parents[static_cast<size_t>(trees.offsets[b] + node)]) path.insert(path.begin(), static_cast<int32_t>(trees.offsets[b] + node));
  return path;
}

void recurrence_case(uint64_t seed, Random& random) {
  const Trees trees(random, between(random, 1, 3), 9);
  const int64_t tail = between(random, 0, 2), nodes = trees.nodes() + tail;
  const Texts texts(random, trees.rows());
  Recurrence call;
  call.nodes = nodes;
  call.groups = between(random, 1, 2);
  call.heads = call.groups * between(random, 1, 2);
  call.keys = one_of<int64_t>(random, {1, 5, 16});
  call.width = one_of<int64_t>(random, {1, 7, 16, 24, 70});
  call.kind = static_cast<Gate>(between(random, 0, 2));
  const bool delta = call.kind != Gate::Element && between(random, 0, 1) == 1;
  const Scalar type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half}), other = one_of<Scalar>(random, {Scalar::Float32, type});
  const int64_t per_key = call.groups * call.keys, per_value = call.heads * call.width, state = call.heads * call.keys * call.width;
  const int64_t per_gate = call.heads * (call.kind == Gate::Head ? 1 : call.kind == Gate::Channel ? call.keys : call.width);
  const Block query(type, nodes * per_key, random), key(type, nodes * per_key, random), value(type, nodes * per_value, random);
  const Block gate(other, nodes * per_gate, random), rate(other, nodes * call.heads, random), decay(other, state, random);
  call.query = {query.data(), type};
  call.key = {key.data(), type};
  call.value = {value.data(), type};
  call.gate = {gate.data(), other};
  if (delta) call.rate = {rate.data(), other};
  if (call.kind == Gate::Element) call.decay = {decay.data(), other};
  call.row_stride = state + between(random, 0, 3);
  const Block before(Scalar::Float32, trees.rows() * call.row_stride, random);
  const float* committed = static_cast<const float*>(before.data());
  std::vector<float> own(committed, committed + trees.rows() * call.row_stride);
  call.state = own.data();
  const Block outputs(type, nodes * per_value), one(type, per_value);
  std::vector<float> corrections(static_cast<size_t>(nodes * per_value)), correction(static_cast<size_t>(per_value));
  const PackedTrees packed = texts.packed(trees, tail, false);
  walk_trees(call, packed, false, outputs.data(), delta ? corrections.data() : nullptr);
  expect(std::equal(own.begin(), own.end(), committed), "a state that nobody commits", seed);

  // One node at a time along a path, then the replay of that path.
  for (int64_t b = 0; b < trees.rows(); ++b) {
    const int64_t count = trees.offsets[b + 1] - trees.offsets[b];
    if (count == 0) continue;
    const std::vector<int32_t> path = path_to(trees, b, between(random, 0, count - 1));
    int32_t length = texts.lengths[static_cast<size_t>(b)];
    const int32_t single[] = {0, 1}, *row = texts.rows.data() + b;
    const int64_t size = outputs.bytes();
    for (const int32_t node : path) {
      if (node < 0) continue;
      Recurrence step = call;
      const auto part = [&](Operand from, int64_t each, int64_t bytes) { return Operand{from.data == nullptr ? nullptr : static_cast<const char*>(from.data) + node * each * bytes, from.type}; };
      step.nodes = 1;
      step.query = part(call.query, per_key, size);
      step.key = part(call.key, per_key, size);
      step.value = part(call.value, per_value, size);
      step.gate = part(call.gate, per_gate, gate.bytes());
      step.rate = part(call.rate, call.heads, gate.bytes());
      walk_trees(step, {row, &length, single, nullptr, 1, 1}, true, one.data(), delta ? correction.data() : nullptr);
      expect(std::memcmp(one.data(), static_cast<const char*>(outputs.data()) + node * per_value * size, static_cast<size_t>(per_value * size)) == 0, "a node of a tree", seed);
      length = 1;
    }
    const std::vector<float> sequential(own.begin() + *row * call.row_stride, own.begin() + *row * call.row_stride + state);
    std::copy_n(committed + *row * call.row_stride, state, own.begin() + *row * call.row_stride);
    Recurrence replayed = call;
    if (delta) replayed.value = {corrections.data(), Scalar::Float32};
    replay_paths(replayed, {row, texts.lengths.data() + b, nullptr, nullptr, 1, nodes}, path.data(), static_cast<int64_t>(path.size()));
    expect(std::equal(sequential.begin(), sequential.end(), own.begin() + *row * call.row_stride), "a replayed state", seed);
  }
}

void convolution_case(uint64_t seed, Random& random) {
  const Trees trees(random, between(random, 1, 3), 9);
  const Texts texts(random, trees.rows());
  const int64_t tail = between(random, 0, 2), nodes = trees.nodes() + tail, channels = one_of<int64_t>(random, {1, 7, 24, 70}), reach = between(random, 1, 4);
  const Scalar type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half});
  const Block inputs(type, nodes * channels, random), weight(Scalar::Float32, channels * reach, random), bias(type, channels, random);
  const Block window(type, trees.rows() * (reach - 1) * channels, random), outputs(type, nodes * channels), one(type, channels);
  const int64_t size = inputs.bytes(), row_bytes = (reach - 1) * channels * size;
  Convolution call;
  call.inputs = {inputs.data(), type};
  call.weight = {weight.data(), Scalar::Float32};
  if (between(random, 0, 1) == 1) call.bias = {bias.data(), type};
  call.window = window.data();
  call.outputs = outputs.data();
  call.row_stride = (reach - 1) * channels;
  call.nodes = nodes;
  call.channels = channels;
  call.reach = reach;
  call.silu = between(random, 0, 1) == 1;
  call.trees = texts.packed(trees, tail, false);
  convolve_trees(call);
  for (int64_t b = 0; b < trees.rows(); ++b) {
    const int64_t count = trees.offsets[b + 1] - trees.offsets[b];
    if (count == 0) continue;
    const std::vector<int32_t> path = path_to(trees, b, between(random, 0, count - 1));
    int32_t length = texts.lengths[static_cast<size_t>(b)];
    const int32_t single[] = {0, 1}, *row = texts.rows.data() + b;
    char* own = static_cast<char*>(window.data()) + *row * row_bytes;
    const std::vector<char> before(own, own + row_bytes);
    for (const int32_t node : path) {
      if (node < 0) continue;
      Convolution step = call;
      step.nodes = 1;
      step.inputs.data = static_cast<const char*>(inputs.data()) + node * channels * size;
      step.outputs = one.data();
      step.trees = {row, &length, single, nullptr, 1, 1};
      step.advance = true;
      convolve_trees(step);
      expect(std::memcmp(one.data(), static_cast<const char*>(outputs.data()) + node * channels * size, static_cast<size_t>(channels * size)) == 0, "a convolved node", seed);
      length = 1;
    }
    const std::vector<char> sequential(own, own + row_bytes);
    std::copy(before.begin(), before.end(), own);
    const WindowMoves moves{static_cast<char*>(window.data()), static_cast<const char*>(inputs.data()), row_bytes, channels * size, reach - 1};
    move_windows(moves, {row, texts.lengths.data() + b, nullptr, nullptr, 1, nodes}, path.data(), static_cast<int64_t>(path.size()));
    expect(std::equal(sequential.begin(), sequential.end(), own), "a moved window", seed);
  }
}

}  // namespace

void recurrent_case(uint64_t seed) {
  Random random(seed);
  recurrence_case(seed, random);
  convolution_case(seed, random);
}

}  // namespace specdec::sanitize

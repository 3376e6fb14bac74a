// batch_invariant_linear and batch_invariant_linear_int8.
#include "linear/batch_invariant_linear.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "sanitize/random_inputs.h"

namespace specdec::sanitize {

void linear_case(uint64_t seed) {
  Random random(seed);
  BatchInvariantLinear call;
  const bool many = seed % 50 == 5;        // rows of an int8 weight, which the tiles of AMX pack
  const bool packed = seed % 50 % 20 == 8;  // rows for which weights stored by input are packed
  call.rows = many ? between(random, 97, 112) : packed ? between(random, 16, 50) : between(random, 1, 15);
  call.inputs = many ? between(random, 513, 530) : packed ? between(random, 120, 140) : between(random, 1, 80);
  call.outputs = one_of<int64_t>(random, {1, 5, 16, 64, 65, 200, 300});
  call.by_input = seed % 2 == 0;
  const int64_t across = call.by_input ? call.outputs : call.inputs, along = call.by_input ? call.inputs : call.outputs;
  call.stride = across + between(random, 0, 3);
  call.type = one_of<Scalar>(random, {Scalar::Float32, Scalar::BFloat16, Scalar::Half, Scalar::Float64});
  const Block x(call.type, call.rows * call.inputs, random), bias(call.type, call.outputs, random);
  const Block weight(call.type, (along - 1) * call.stride + across, random);
  call.x = x.data();
  call.weight = weight.data();
  call.bias = seed % 3 == 0 ? nullptr : bias.data();
  std::vector<int8_t> bytes(static_cast<size_t>((along - 1) * call.stride + across));
  std::vector<float> scale(static_cast<size_t>(call.outputs));
  if (!call.by_input && call.type != Scalar::Float64 && seed % 5 == 0) {
    for (int8_t& value : bytes) value = static_cast<int8_t>(between(random, -127, 127));
    for (float& value : scale) value = static_cast<float>(between(random, 1, 9)) / 1024;
    call.weight = bytes.data();
    call.scale = scale.data();
  }
  const auto weight_at = [&](int64_t n, int64_t k) {
    const int64_t at = call.by_input ? k * call.stride + n : n * call.stride + k;
    return call.scale == nullptr ? weight.get(at) : static_cast<double>(bytes[at]) * scale[n];
  };
  for (Isa isa : {Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx}) {
    const Block out(call.type, call.rows * call.outputs), one(call.type, call.outputs);
    call.out = out.data();
    batch_invariant_linear(call, isa);
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t n = 0; n < call.outputs; ++n) {
        double sum = call.bias == nullptr ? 0.0 : bias.get(n);
        for (int64_t k = 0; k < call.inputs; ++k) {
          sum += x.get(row * call.inputs + k) * weight_at(n, k);
        }
        const double rounding = call.type == Scalar::BFloat16 ? 8e-3 : call.type == Scalar::Half ? 1e-3 : 1e-5;
        expect(std::abs(out.get(row * call.outputs + n) - sum) <= rounding * (2 + std::abs(sum)), "batch_invariant_linear", seed);
      }
    }
    BatchInvariantLinear alone = call;  // the last row alone has the same bits
    const int64_t size = x.bytes();
    alone.rows = 1;
    alone.x = static_cast<const char*>(call.x) + (call.rows - 1) * call.inputs * size;
    alone.out = one.data();
    batch_invariant_linear(alone, isa);
    const char* last = static_cast<const char*>(call.out) + (call.rows - 1) * call.outputs * size;
    expect(std::memcmp(last, alone.out, static_cast<size_t>(call.outputs * size)) == 0, "a row alone", seed);
  }
}

}  // namespace specdec::sanitize

// batch_invariant_linear.
#include "linear/batch_invariant_linear.h"

#include <cmath>
#include <cstring>

#include "sanitize/random_inputs.h"

namespace specdec::sanitize {

void linear_case(uint64_t seed) {
  Random random(seed);
  BatchInvariantLinear call;
  call.rows = between(random, 1, 15);
  call.inputs = between(random, 1, 80);
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
  for (Isa isa : {Isa::Portable, Isa::Avx2, Isa::Avx512}) {
    const Block out(call.type, call.rows * call.outputs), one(call.type, call.outputs);
    call.out = out.data();
    batch_invariant_linear(call, isa);
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t n = 0; n < call.outputs; ++n) {
        double sum = call.bias == nullptr ? 0.0 : bias.get(n);
        for (int64_t k = 0; k < call.inputs; ++k) {
          sum += x.get(row * call.inputs + k) * weight.get(call.by_input ? k * call.stride + n : n * call.stride + k);
        }
        const double rounding = call.type == Scalar::BFloat16 ? 8e-3 : call.type == Scalar::Half ? 1e-3 : 1e-5;
        expect(std::abs(out.get(row * call.outputs + n) - sum) <= rounding * (2 + std::abs(sum)), "batch_invariant_linear", seed);
      }
    }
    BatchInvariantLinear alone = call;  // the last row alone has the same bits
    const int64_t bytes = x.bytes();
    alone.rows = 1;
    alone.x = static_cast<const char*>(call.x) + (call.rows - 1) * call.inputs * bytes;
    alone.out = one.data();
    batch_invariant_linear(alone, isa);
    const char* last = static_cast<const char*>(call.out) + (call.rows - 1) * call.outputs * bytes;
    expect(std::memcmp(last, alone.out, static_cast<size_t>(call.outputs * bytes)) == 0, "a row alone", seed);
  }
}

}  // namespace specdec::sanitize

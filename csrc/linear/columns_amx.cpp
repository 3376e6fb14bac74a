// batch_invariant_linear with the tiles of AMX (tdpbf16ps), for bfloat16 rows and a bfloat16 or int8 weight stored by output.
// batch_invariant_linear.cpp calls it only on processors that have them. The instruction takes subnormal numbers as zero.
//
// A tile of 16 outputs by 32 inputs is read from the weight as it is stored. It multiplies up to 16 packed rows of x, so a few
// rows cost as much as one. int8 values are exact in bfloat16. For many rows they are packed into the level-1 cache and multiplied
// with all tiles of x, which adds the inputs of an output in the same order.
#include "linear/batch_invariant_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")
#endif

namespace specdec {
namespace {

constexpr int64_t kOutputs = 16, kInputs = 32;  // of a tile of weights
constexpr int64_t kMostRows = 16;               // of a tile of x
// Tile registers, which must be literals: 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x.

// Whether packing weights pays: int8 values are then converted once for all rows. Of bfloat16 it measured no faster.
bool is_many(const BatchInvariantLinear& call) { return call.scale != nullptr && call.rows > 6 * kMostRows; }

// Rows of a tile of x, a power of two. The sums of a row do not depend on it.
int64_t width_of(const BatchInvariantLinear& call) {
  int64_t width = 1;
  while (width < call.rows && width < kMostRows) width *= 2;
  return width;
}
int64_t steps_of(const BatchInvariantLinear& call) { return (call.inputs + kInputs - 1) / kInputs; }

// The bfloat16 elements of a packed tile: [pairs of inputs, rows, 2].
int64_t tile_size(int64_t width) { return kInputs * width; }

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit Configuration(int64_t width) {
    for (int tile = 0; tile < 8; ++tile) {
      bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 2 * kInputs : 4 * width);
      rows[tile] = kOutputs;
    }
  }
};
static_assert(sizeof(Configuration) == 64);
static_assert(kInputs / 2 == kOutputs, "tiles of x have as many rows as the others");

// Kinds of weights. `read` returns where a tile of them lies, and its stride in bytes.
struct Place {
  const void* at;
  int64_t stride;
};

struct Bfloat16Weights {
  const BatchInvariantLinear& call;
  const BFloat16* from(int64_t column) const { return static_cast<const BFloat16*>(call.weight) + column * call.stride; }

  Place read(int64_t column, int64_t outputs, int64_t k, BFloat16* copy) const {
    if (outputs == kOutputs && k + kInputs <= call.inputs) return {from(column) + k, call.stride * int64_t{sizeof(BFloat16)}};
    const int64_t inputs = std::min(call.inputs - k, kInputs);
    std::memset(copy, 0, kOutputs * kInputs * sizeof(BFloat16));
    for (int64_t i = 0; i < outputs; ++i) std::memcpy(copy + i * kInputs, from(column + i) + k, static_cast<size_t>(inputs) * sizeof(BFloat16));
    return {copy, kInputs * int64_t{sizeof(BFloat16)}};
  }
  // Of the tile `ahead` outputs further on.
  void prefetch(int64_t column, int64_t ahead, int64_t k) const {
    for (int64_t i = 0; i < kOutputs; ++i) _mm_prefetch(reinterpret_cast<const char*>(from(column + ahead + i) + k), _MM_HINT_T0);
  }
};

struct Int8Weights {
  const BatchInvariantLinear& call;
  const int8_t* from(int64_t column) const { return static_cast<const int8_t*>(call.weight) + column * call.stride; }

  Place read(int64_t column, int64_t outputs, int64_t k, BFloat16* copy) const {
    const int64_t inputs = std::min(call.inputs - k, kInputs);
    const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << inputs) - 1);
    for (int64_t i = 0; i < kOutputs; ++i) {
      const __m256i raw = _mm256_maskz_loadu_epi8(i < outputs ? mask : 0, from(column + (i < outputs ? i : 0)) + k);
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(raw)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(raw, 1)));
      _mm512_store_si512(copy + i * kInputs, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return {copy, kInputs * int64_t{sizeof(BFloat16)}};
  }
  void prefetch(int64_t column, int64_t ahead, int64_t k) const {
    if (k % (2 * kInputs) != 0) return;  // a line has the inputs of two tiles
    for (int64_t i = 0; i < kOutputs; ++i) _mm_prefetch(reinterpret_cast<const char*>(from(column + ahead + i) + k), _MM_HINT_T0);
  }
};

// Up to 16 outputs, from their sums in float32.
struct Line {
  const BatchInvariantLinear& call;
  int64_t column;
  __mmask16 mask;
  __m512 scale = _mm512_set1_ps(1.0f), bias = _mm512_setzero_ps();

  Line(const BatchInvariantLinear& of, int64_t first, __mmask16 outputs) : call(of), column(first), mask(outputs) {
    if (call.scale != nullptr) scale = _mm512_maskz_loadu_ps(mask, call.scale + column);
    if (call.bias == nullptr) return;
    const __m256i raw = _mm256_maskz_loadu_epi16(mask, static_cast<const BFloat16*>(call.bias) + column);
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  void put(__m512 sums, int64_t row) const {
    BFloat16* to = static_cast<BFloat16*>(call.out) + row * out_stride(call) + column;
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_mul_ps(sums, scale), bias)));
  }
};

// Writes the sums of a tile, [16 outputs, width], to the outputs of its rows.
void put(const BatchInvariantLinear& call, const float* sums, int64_t width, int64_t row, int64_t rows, int64_t column, int64_t outputs) {
  const Line line(call, column, static_cast<__mmask16>((1u << outputs) - 1));
  const __m512i lanes = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(static_cast<int>(width)));
  for (int64_t r = 0; r < rows; ++r) line.put(_mm512_i32gather_ps(lanes, sums + r, 4), row + r);
}

// A by B tiles: outputs column.. and the packed tiles of x from `tile` on.
template <int A, int B, class Weights>
void block(const Weights& weights, const BFloat16* x, int64_t width, int64_t tile, int64_t column, int64_t end, bool first) {
  alignas(64) BFloat16 copies[2][kOutputs * kInputs];
  alignas(64) float sums[kOutputs * kMostRows];
  const BatchInvariantLinear& call = weights.call;
  const int64_t steps = steps_of(call), size = tile_size(width), outputs[2] = {std::min(end - column, kOutputs), std::min(end - column - kOutputs, kOutputs)};
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (A > 1) _tile_zero(2);
  if constexpr (A > 1 && B > 1) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    const BFloat16* rows = x + (tile * steps + s) * size;
    const Place low = weights.read(column, outputs[0], s * kInputs, copies[0]);
    _tile_loadd(4, low.at, low.stride);
    if constexpr (A > 1) {
      const Place high = weights.read(column + kOutputs, outputs[1], s * kInputs, copies[1]);
      _tile_loadd(5, high.at, high.stride);
    }
    if (first) {
      weights.prefetch(column, A * kOutputs, s * kInputs);
      if constexpr (A > 1) weights.prefetch(column + kOutputs, A * kOutputs, s * kInputs);
    }
    _tile_loadd(6, rows, 4 * width);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (A > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (B > 1) {
      _tile_loadd(7, rows + steps * size, 4 * width);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (A > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  const auto write = [&](int a, int b) {
    const int64_t row = (tile + b) * width;
    put(call, sums, width, row, std::min(call.rows - row, width), column + a * kOutputs, outputs[a]);
  };
  _tile_stored(0, sums, 4 * width);
  write(0, 0);
  if constexpr (B > 1) {
    _tile_stored(1, sums, 4 * width);
    write(0, 1);
  }
  if constexpr (A > 1) {
    _tile_stored(2, sums, 4 * width);
    write(1, 0);
  }
  if constexpr (A > 1 && B > 1) {
    _tile_stored(3, sums, 4 * width);
    write(1, 1);
  }
}

template <int A, class Weights>
void all_rows(const Weights& weights, const BFloat16* x, int64_t column, int64_t end) {
  const int64_t width = width_of(weights.call), tiles = (weights.call.rows + width - 1) / width;
  for (int64_t tile = 0; tile < tiles; tile += 2) {
    if (tile + 1 < tiles) {
      block<A, 2>(weights, x, width, tile, column, end, tile == 0);
    } else {
      block<A, 1>(weights, x, width, tile, column, end, tile == 0);
    }
  }
}

// Lanes of two vectors for every step of a transposition: those that go to the first one, and to the second.
constexpr auto kTransposition = [] {
  std::array<std::array<std::array<int32_t, 16>, 2>, 4> lanes{};
  for (int step = 0; step < 4; ++step)
    for (int lane = 0, bit = 1 << step; lane < 16; ++lane) {
      lanes[step][0][lane] = (lane & bit) != 0 ? 16 + (lane ^ bit) : lane;
      lanes[step][1][lane] = (lane & bit) != 0 ? 16 + lane : lane ^ bit;
    }
  return lanes;
}();

// Writes a tile of weights, [16 outputs, 32 inputs], as [16 pairs of inputs, 16 outputs, 2].
void pack_weights(const Place& from, BFloat16* to) {
  __m512i rows[kOutputs];
  for (int i = 0; i < kOutputs; ++i) rows[i] = _mm512_loadu_si512(static_cast<const char*>(from.at) + i * from.stride);
  for (int step = 0; step < 4; ++step) {
    const __m512i first = _mm512_loadu_si512(kTransposition[step][0].data()), second = _mm512_loadu_si512(kTransposition[step][1].data());
    for (int i = 0, bit = 1 << step; i < kOutputs; ++i) {
      if ((i & bit) != 0) continue;
      const __m512i low = rows[i], high = rows[i | bit];
      rows[i] = _mm512_permutex2var_epi32(low, first, high);
      rows[i | bit] = _mm512_permutex2var_epi32(low, second, high);
    }
  }
  for (int i = 0; i < kOutputs; ++i) _mm512_store_si512(to + i * kInputs, rows[i]);
}

// Writes the sums of A tiles, [16 rows, 16 outputs] each, to the outputs of their rows: a whole cache line at a time.
template <int A>
void put_many(const BatchInvariantLinear& call, const float* sums, int64_t tile, int64_t column, int64_t end) {
  const auto mask = [&](int64_t from) { return static_cast<__mmask16>((1u << std::min(end - from, kOutputs)) - 1); };
  const int64_t row = tile * kMostRows, rows = std::min(call.rows - row, kMostRows), second = column + (A - 1) * kOutputs;
  const Line low(call, column, mask(column)), high(call, second, mask(second));
  for (int64_t r = 0; r < rows; ++r) {
    low.put(_mm512_load_ps(sums + r * kOutputs), row + r);
    if constexpr (A > 1) high.put(_mm512_load_ps(sums + (kMostRows + r) * kOutputs), row + r);
  }
}

constexpr int64_t kPackedSteps = 16;  // tiles of 32 inputs whose weights are packed at a time: 32 KiB for 32 outputs

// Sums of A by B tiles over the packed inputs: [A][B] tiles of outputs and rows, from `sums` on if they continue.
template <int A, int B>
void block_of_many(const BFloat16* weights, const BFloat16* x, int64_t x_stride, int64_t steps, float* sums, bool continues) {
  constexpr int64_t kRow = 4 * kOutputs, kTile = kOutputs * kMostRows, kSize = kInputs * kOutputs;
  if (continues) {
    _tile_loadd(0, sums, kRow);
    if constexpr (A > 1) _tile_loadd(2, sums + kTile, kRow);
    if constexpr (B > 1) _tile_loadd(1, sums + 2 * kTile, kRow);
    if constexpr (A > 1 && B > 1) _tile_loadd(3, sums + 3 * kTile, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, x + s * kSize, kRow);
    _tile_loadd(4, weights + s * A * kSize, kRow);
    _tile_dpbf16ps(0, 6, 4);
    if constexpr (A > 1) {
      _tile_loadd(5, weights + (s * A + 1) * kSize, kRow);
      _tile_dpbf16ps(2, 6, 5);
    }
    if constexpr (B > 1) {
      _tile_loadd(7, x + x_stride + s * kSize, kRow);
      _tile_dpbf16ps(1, 7, 4);
      if constexpr (A > 1) _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, sums, kRow);
  if constexpr (A > 1) _tile_stored(2, sums + kTile, kRow);
  if constexpr (B > 1) _tile_stored(1, sums + 2 * kTile, kRow);
  if constexpr (A > 1 && B > 1) _tile_stored(3, sums + 3 * kTile, kRow);
}

// Outputs column.. of all rows, A tiles of them. `sums` has room for 4 tiles per 2 tiles of x.
template <int A>
void all_rows_of_many(const Int8Weights& weights, const BFloat16* x, int64_t column, int64_t end, float* sums) {
  constexpr int64_t kTile = kOutputs * kMostRows, kSize = kInputs * kOutputs;
  alignas(64) static thread_local BFloat16 packed[2 * kPackedSteps * kSize];
  alignas(64) BFloat16 copy[kSize];
  const BatchInvariantLinear& call = weights.call;
  const int64_t steps = steps_of(call), tiles = (call.rows + kMostRows - 1) / kMostRows, size = steps * kSize;
  const int64_t parts = (steps + kPackedSteps - 1) / kPackedSteps, most = (steps + parts - 1) / parts;
  for (int64_t from = 0; from < steps; from += most) {
    const int64_t count = std::min(most, steps - from);
    for (int64_t s = 0; s < count; ++s)
      for (int a = 0; a < A; ++a) {
        const int64_t first = column + a * kOutputs;
        weights.prefetch(first, kOutputs, (from + s) * kInputs);
        pack_weights(weights.read(first, std::min(end - first, kOutputs), (from + s) * kInputs, copy), packed + (s * A + a) * kSize);
      }
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const BFloat16* rows = x + tile * size + from * kSize;
      float* own = sums + (parts == 1 ? 0 : tile * 2 * kTile);
      const bool pair = tile + 1 < tiles;
      if (pair) {
        block_of_many<A, 2>(packed, rows, size, count, own, from > 0);
      } else {
        block_of_many<A, 1>(packed, rows, size, count, own, from > 0);
      }
      if (from + count < steps) continue;
      for (int b = 0; b < (pair ? 2 : 1); ++b) put_many<A>(call, own + 2 * b * kTile, tile + b, column, end);
    }
  }
}

void columns_of_many(const Int8Weights& weights, const BFloat16* x, int64_t begin, int64_t end) {
  struct alignas(64) Tile {
    float values[kOutputs * kMostRows];
  };
  static thread_local std::vector<Tile> memory;
  const int64_t pairs = steps_of(weights.call) <= kPackedSteps ? 1 : (weights.call.rows + 2 * kMostRows - 1) / (2 * kMostRows);
  memory.resize(std::max(memory.size(), static_cast<size_t>(4 * pairs)));
  float* sums = memory.data()->values;
  int64_t column = begin;
  for (; column + kOutputs < end; column += 2 * kOutputs) all_rows_of_many<2>(weights, x, column, end, sums);
  if (column < end) all_rows_of_many<1>(weights, x, column, end, sums);
}

template <class Weights>
void columns(const Weights& weights, const BFloat16* x, int64_t begin, int64_t end) {
  const Configuration configuration(width_of(weights.call));
  _tile_loadconfig(&configuration);
  int64_t column = begin;
  if constexpr (std::is_same_v<Weights, Int8Weights>) {
    if (is_many(weights.call)) {
      columns_of_many(weights, x, begin, end);
      column = end;
    }
  }
  for (; column + kOutputs < end; column += 2 * kOutputs) all_rows<2>(weights, x, column, end);
  if (column < end) all_rows<1>(weights, x, column, end);
  _tile_release();
}

}  // namespace

int64_t packed_bytes_amx(const BatchInvariantLinear& call) {
  const int64_t width = width_of(call);
  return (call.rows + width - 1) / width * steps_of(call) * tile_size(width) * int64_t{sizeof(BFloat16)};
}

void pack_rows_amx(const BatchInvariantLinear& call, void* packed) {
  const int64_t width = width_of(call), steps = steps_of(call), pairs = call.inputs / 2;
  std::memset(packed, 0, static_cast<size_t>(packed_bytes_amx(call)));
  for (int64_t row = 0; row < call.rows; ++row) {
    const BFloat16* from = static_cast<const BFloat16*>(call.x) + row * call.inputs;
    // The tiles of a row follow each other, so its pairs are `width` pairs apart throughout.
    BFloat16* to = static_cast<BFloat16*>(packed) + row / width * steps * tile_size(width);
    if (is_many(call)) {  // tiles are read as [rows, inputs]
      to += row % width * kInputs;
      for (int64_t k = 0; k < call.inputs; k += kInputs, to += tile_size(width)) {
        std::memcpy(to, from + k, static_cast<size_t>(std::min(call.inputs - k, kInputs)) * sizeof(BFloat16));
      }
      continue;
    }
    to += row % width * 2;
    for (int64_t p = 0; p < pairs; ++p) std::memcpy(to + p * width * 2, from + p * 2, 2 * sizeof(BFloat16));
    if (call.inputs % 2 != 0) to[pairs * width * 2] = from[call.inputs - 1];
  }
}

void columns_amx(const BatchInvariantLinear& call, const void* x, int64_t begin, int64_t end) {
  const BFloat16* rows = static_cast<const BFloat16*>(x);
  if (call.scale != nullptr) return columns(Int8Weights{call}, rows, begin, end);
  columns(Bfloat16Weights{call}, rows, begin, end);
}

}  // namespace specdec

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

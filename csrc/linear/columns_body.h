// Vector code of batch_invariant_linear: x [rows, inputs], out [rows, outputs]. Each instruction set's file includes it once,
// inside its target pragma and namespace, after simd.h.

// Register tiles of a weight stored by input: kTileRows rows by kTileVectors vectors of outputs, or one row by
// kWideVectors.
constexpr int kTileRows = 6, kTileVectors = kLanes == 16 ? 4 : 2, kWideVectors = kLanes == 16 ? 16 : 8;
constexpr int64_t kAheadWide = 8;                  // inputs that a wide tile prefetches ahead
constexpr int64_t kAhead = kLanes == 16 ? 32 : 0;  // inputs that a tile of few rows prefetches ahead (0: the next tile's part of this input)
constexpr int64_t kDepth = 128;  // inputs per partial sum: shorter sums have less rounding error

// Loads the first `count` lanes; the others are zero.
template <class T>
inline Floats load_part(const T* from, int64_t count) {
  float some[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = widen(from[i]);
  return load(some);
}

// Writes the first `count` lanes of sum + bias.
template <class T>
inline void put(Floats sum, const T* bias, T* to, int64_t count) {
  if (bias != nullptr) sum = sum + (count == kLanes ? load(bias) : load_part(bias, count));
  if constexpr (std::is_same_v<T, float>) {
    if (count == kLanes) return store(to, sum);
  }
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(sum[i]);
}

// R rows by C vectors of outputs. If WHOLE is false, C = 1 and `last` lanes of the vector are outputs.
// Prefetching depends on F. A wide tile (F = 0) prefetches its own vectors kAheadWide inputs ahead. With at most two row
// tiles, or a single vector (F = C), it prefetches kAhead inputs ahead and, near the end, the next tile's first inputs. With
// many row tiles (F < C) it prefetches F vectors of the neighbouring outputs, from `beside`, which share its pages.
template <class T, int R, int C, int F, bool WHOLE>
inline void by_input(const BatchInvariantLinear& call, const float* x, int64_t row, int64_t column, int64_t beside, int64_t last) {
  Floats whole[R][C], sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) whole[r][c] = Floats{};
  const T* weight = static_cast<const T*>(call.weight) + column;
  const float* from = x + row * call.inputs;
  for (int64_t start = 0; start < call.inputs; start += kDepth) {
    const int64_t stop = call.inputs - start < kDepth ? call.inputs : start + kDepth;
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = Floats{};
    for (int64_t k = start; k < stop; ++k, weight += call.stride) {
      Floats values[C];
      const T* ahead = weight + C * kLanes;
      if constexpr (kAhead > 0) ahead = k + kAhead < call.inputs ? weight + kAhead * call.stride : ahead + (kAhead - call.inputs) * call.stride;
      for (int c = 0; c < C; ++c) {
        values[c] = WHOLE ? load(weight + c * kLanes) : load_part(weight, last);
        if constexpr (F == 0) __builtin_prefetch(weight + kAheadWide * call.stride + c * kLanes);
        if constexpr (F == C) __builtin_prefetch(ahead + c * kLanes);
      }
      if constexpr (F < C) {
        for (int f = 0; f < F; ++f) __builtin_prefetch(weight + beside + f * kLanes);
      }
      for (int r = 0; r < R; ++r) {
        const Floats factor = all(from[r * call.inputs + k]);
        for (int c = 0; c < C; ++c) sums[r][c] = fma(factor, values[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) whole[r][c] = whole[r][c] + sums[r][c];
  }
  const T* bias = call.bias == nullptr ? nullptr : static_cast<const T*>(call.bias) + column;
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      put(whole[r][c], bias == nullptr ? bias : bias + c * kLanes, static_cast<T*>(call.out) + (row + r) * out_stride(call) + column + c * kLanes,
          WHOLE ? kLanes : last);
}

template <class T, int C, int F, bool WHOLE, int R = kTileRows>
inline void rows_by_input(const BatchInvariantLinear& call, const float* x, int64_t row, int64_t count, int64_t column, int64_t beside, int64_t last) {
  if (count == R) return by_input<T, R, C, F, WHOLE>(call, x, row, column, beside, last);
  if constexpr (R > 1) rows_by_input<T, C, F, WHOLE, R - 1>(call, x, row, count, column, beside, last);
}

// All rows over C vectors of outputs, in tiles of nearly equal size. If there are many tiles, each prefetches a part of the
// neighbouring outputs, so memory is read during the computation.
template <class T, int C, bool WHOLE>
void tiles_by_input(const BatchInvariantLinear& call, const float* x, int64_t column, int64_t last) {
  const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = t * call.rows / tiles, count = (t + 1) * call.rows / tiles - row;
    const auto tile = [&](auto fetched) {
      constexpr int F = decltype(fetched)::value;
      rows_by_input<T, C, F, WHOLE>(call, x, row, count, column, (C + t * F % C) * kLanes, last);
    };
    if (tiles < 3) {
      tile(std::integral_constant<int, C>{});
    } else if (tiles < C) {
      tile(std::integral_constant<int, (C + 1) / 2>{});
    } else {
      tile(std::integral_constant<int, 1>{});
    }
  }
}

// With this many rows, packing weights costs less than it saves: weights of one output lie `stride` apart, so each input's is
// on another page and in few sets of the caches.
constexpr int64_t kManyRows = 4 * kTileRows;

// R rows by C packed vectors of outputs: adds the products of `depth` inputs to whole [R, C * kLanes], or begins it.
template <int R, int C>
inline void add_packed(const float* packed, const float* x, int64_t x_stride, int64_t depth, float* whole, bool begins) {
  Floats sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = Floats{};
  for (int64_t k = 0; k < depth; ++k, packed += C * kLanes) {
    Floats values[C];
    for (int c = 0; c < C; ++c) values[c] = load(packed + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats factor = all(x[r * x_stride + k]);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(factor, values[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c, whole += kLanes) store(whole, (begins ? Floats{} : load(whole)) + sums[r][c]);
}

template <int C, int R = kTileRows>
inline void rows_packed(const float* packed, const float* x, int64_t x_stride, int64_t depth, float* whole, bool begins, int64_t count) {
  if (count == R) return add_packed<R, C>(packed, x, x_stride, depth, whole, begins);
  if constexpr (R > 1) rows_packed<C, R - 1>(packed, x, x_stride, depth, whole, begins, count);
}

// Many rows over C vectors of outputs. The weights of kDepth inputs are packed into the level-1 cache, and multiply all rows.
// The sums are those of by_input, in the same order.
template <class T, int C>
void many_by_input(const BatchInvariantLinear& call, const float* x, int64_t column) {
  constexpr int64_t kWidth = C * kLanes;
  struct Row {  // a type of this instruction set's own, so that no other one uses its vector's code
    float values[kWidth];
  };
  alignas(64) float packed[kDepth * kWidth], copy[kTileRows * kDepth];
  static thread_local std::vector<Row> memory;
  memory.resize(memory.size() > static_cast<size_t>(call.rows) ? memory.size() : static_cast<size_t>(call.rows));
  float* const wholes = memory.data()->values;
  const T* weight = static_cast<const T*>(call.weight) + column;
  for (int64_t start = 0; start < call.inputs; start += kDepth) {
    const int64_t depth = call.inputs - start < kDepth ? call.inputs - start : kDepth;
    for (int64_t k = 0; k < depth; ++k, weight += call.stride) {
      for (int c = 0; c < C; ++c) store(packed + k * kWidth + c * kLanes, load(weight + c * kLanes));
    }
    const T* next = start + depth < call.inputs ? weight : static_cast<const T*>(call.weight) + column + kWidth;
    const int64_t ahead = kDepth * kTileRows / call.rows + 1;  // inputs to prefetch per tile
    for (int64_t row = 0; row < call.rows; row += kTileRows) {
      const int64_t count = call.rows - row < kTileRows ? call.rows - row : kTileRows;
      for (int64_t k = 0; k < ahead; ++k, next += call.stride) {
        for (int c = 0; c < C; ++c) __builtin_prefetch(next + c * kLanes, 0, 2);
      }
      for (int64_t r = 0; r < count; ++r) __builtin_memcpy(copy + r * kDepth, x + (row + r) * call.inputs + start, static_cast<size_t>(depth) * sizeof(float));
      rows_packed<C>(packed, copy, kDepth, depth, wholes + row * kWidth, start == 0, count);
    }
  }
  const T* bias = call.bias == nullptr ? nullptr : static_cast<const T*>(call.bias) + column;
  for (int64_t row = 0; row < call.rows; ++row)
    for (int c = 0; c < C; ++c) {
      const Floats whole = call.inputs > 0 ? load(wholes + row * kWidth + c * kLanes) : Floats{};
      put(whole, bias == nullptr ? bias : bias + c * kLanes, static_cast<T*>(call.out) + row * out_stride(call) + column + c * kLanes, kLanes);
    }
}

template <class T>
void all_by_input(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end) {
  int64_t column = begin;
  if (call.rows == 1) {
    for (; column + kWideVectors * kLanes <= end; column += kWideVectors * kLanes) by_input<T, 1, kWideVectors, 0, true>(call, x, 0, column, 0, 0);
  }
  if (call.rows >= kManyRows) {
    for (; column + kTileVectors * kLanes <= end; column += kTileVectors * kLanes) many_by_input<T, kTileVectors>(call, x, column);
    for (; column + kLanes <= end; column += kLanes) many_by_input<T, 1>(call, x, column);
  }
  for (; column + kTileVectors * kLanes <= end; column += kTileVectors * kLanes) tiles_by_input<T, kTileVectors, true>(call, x, column, 0);
  for (; column + kLanes <= end; column += kLanes) tiles_by_input<T, 1, true>(call, x, column, 0);
  if (column < end) tiles_by_input<T, 1, false>(call, x, column, end - column);
}

// R rows by kLanes / R outputs of weights stored by output: kLanes dot products, reduced together at the end. T: the type of
// out, W: that of the weight. FIRST: the weights come from memory, and those of the next outputs are prefetched.
template <class T, class W, int R, bool FIRST>
inline void by_output(const BatchInvariantLinear& call, const float* x, int64_t row, int64_t column, int64_t end) {
  constexpr int kOutputs = kLanes / R;
  const int64_t count = end - column < kOutputs ? end - column : kOutputs, whole = call.inputs / kLanes * kLanes, rest = call.inputs - whole;
  const W* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) weights[i] = static_cast<const W*>(call.weight) + (column + (i < count ? i : 0)) * call.stride;
  Floats sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = Floats{};
  const float* from = x + row * call.inputs;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Floats factors[R];
    for (int r = 0; r < R; ++r) factors[r] = load(from + r * call.inputs + k);
    for (int i = 0; i < kOutputs; ++i) {
      const Floats values = load(weights[i] + k);
      if constexpr (FIRST) __builtin_prefetch(weights[i] + kLanes * call.stride + k);
      for (int r = 0; r < R; ++r) sums[r * kOutputs + i] = fma(factors[r], values, sums[r * kOutputs + i]);
    }
  }
  for (int i = 0; i < kOutputs && rest > 0; ++i) {
    const Floats values = load_part(weights[i] + whole, rest);
    for (int r = 0; r < R; ++r) {
      sums[r * kOutputs + i] = fma(load_part(from + r * call.inputs + whole, rest), values, sums[r * kOutputs + i]);
    }
  }
  float joined[kLanes];
  store(joined, totals(sums));
  if constexpr (std::is_same_v<W, int8_t>) {
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < count; ++i) joined[r * kOutputs + i] *= call.scale[column + i];
  }
  const T* bias = call.bias == nullptr ? nullptr : static_cast<const T*>(call.bias) + column;
  for (int r = 0; r < R; ++r) {
    T* to = static_cast<T*>(call.out) + (row + r) * out_stride(call) + column;
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(joined[r * kOutputs + i] + (bias == nullptr ? 0.0f : widen(bias[i])));
  }
}

// Processes so few outputs at a time that their weights stay in cache for all rows.
template <class T, class W>
void all_by_output(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t last = end - first < kLanes ? end : first + kLanes;
    int64_t row = 0;
    const auto rows_of = [&](auto many) {
      constexpr int kRows = decltype(many)::value;
      for (; row + kRows <= call.rows; row += kRows)
        for (int64_t column = first; column < last; column += kLanes / kRows) {
          if (row == 0) {
            by_output<T, W, kRows, true>(call, x, row, column, last);
          } else {
            by_output<T, W, kRows, false>(call, x, row, column, last);
          }
        }
    };
    rows_of(std::integral_constant<int, 4>{});
    rows_of(std::integral_constant<int, 2>{});
    rows_of(std::integral_constant<int, 1>{});
  }
}

template <class T>
inline void columns_of(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end) {
  if (call.by_input) return all_by_input<T>(call, x, begin, end);
  if (call.scale != nullptr) return all_by_output<T, int8_t>(call, x, begin, end);
  all_by_output<T, T>(call, x, begin, end);
}

inline void columns(const BatchInvariantLinear& call, const float* x, int64_t begin, int64_t end) {
  if (call.type == Scalar::BFloat16) return columns_of<BFloat16>(call, x, begin, end);
  if (call.type == Scalar::Half) return columns_of<Half>(call, x, begin, end);
  columns_of<float>(call, x, begin, end);
}

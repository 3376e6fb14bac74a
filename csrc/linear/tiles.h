// Vector code of row_linear. Included once per instruction set, inside that file's target pragma and namespace, after
// simd.h.

// Register tiles of a weight stored by input: kTileRows rows by kTileVectors vectors of outputs, or one row by kWideVectors.
constexpr int kTileRows = 6, kTileVectors = kLanes == 16 ? 4 : 2, kWideVectors = kLanes == 16 ? 16 : 8;
// What is fetched before it is used: where a tile takes few bytes of an input, the tile beside it, whose bytes share the
// pages; else the same tile of an input this many ahead.
constexpr bool kFetchBeside = kLanes < 16;
constexpr int64_t kAhead = 8;
constexpr int64_t kDepth = 128;  // inputs that are added up before the sum joins the others: shorter sums round less

// The first `count` lanes; zero in the others.
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

// R rows by C vectors of outputs, the last one of `last` lanes (C = 1 where that is not all).
template <class T, int R, int C>
inline void by_input(const RowLinear& call, const float* x, int64_t row, int64_t column, int64_t last = kLanes) {
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
      for (int c = 0; c < C; ++c) {
        values[c] = last == kLanes ? load(weight + c * kLanes) : load_part(weight, last);
        __builtin_prefetch(weight + (kFetchBeside ? C * kLanes : kAhead * call.stride) + c * kLanes);
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
      put(whole[r][c], bias == nullptr ? bias : bias + c * kLanes, static_cast<T*>(call.out) + (row + r) * call.outputs + column + c * kLanes, last);
}

template <class T, int C, int R = kTileRows>
inline void rows_by_input(const RowLinear& call, const float* x, int64_t row, int64_t count, int64_t column, int64_t last = kLanes) {
  if (count == R) return by_input<T, R, C>(call, x, row, column, last);
  if constexpr (R > 1) rows_by_input<T, C, R - 1>(call, x, row, count, column, last);
}

template <class T>
void all_by_input(const RowLinear& call, const float* x, int64_t begin, int64_t end) {
  int64_t column = begin;
  if (call.rows == 1) {
    for (; column + kWideVectors * kLanes <= end; column += kWideVectors * kLanes) by_input<T, 1, kWideVectors>(call, x, 0, column);
  }
  const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
  const auto all_rows = [&](auto vectors, int64_t last) {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * call.rows / tiles, count = (t + 1) * call.rows / tiles - row;
      rows_by_input<T, decltype(vectors)::value>(call, x, row, count, column, last);
    }
  };
  for (; column + kTileVectors * kLanes <= end; column += kTileVectors * kLanes) all_rows(std::integral_constant<int, kTileVectors>{}, kLanes);
  for (; column < end; column += kLanes) all_rows(std::integral_constant<int, 1>{}, end - column < kLanes ? end - column : kLanes);
}

// R rows by kLanes / R outputs whose weights lie by output: kLanes dot products, joined at the end.
template <class T, int R>
inline void by_output(const RowLinear& call, const float* x, int64_t row, int64_t column, int64_t end) {
  constexpr int kOutputs = kLanes / R;
  const int64_t count = end - column < kOutputs ? end - column : kOutputs, whole = call.inputs / kLanes * kLanes, rest = call.inputs - whole;
  const T* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) weights[i] = static_cast<const T*>(call.weight) + (column + (i < count ? i : 0)) * call.stride;
  Floats sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = Floats{};
  const float* from = x + row * call.inputs;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Floats factors[R];
    for (int r = 0; r < R; ++r) factors[r] = load(from + r * call.inputs + k);
    for (int i = 0; i < kOutputs; ++i) {
      const Floats values = load(weights[i] + k);
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
  const T* bias = call.bias == nullptr ? nullptr : static_cast<const T*>(call.bias) + column;
  for (int r = 0; r < R; ++r) {
    T* to = static_cast<T*>(call.out) + (row + r) * call.outputs + column;
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(joined[r * kOutputs + i] + (bias == nullptr ? 0.0f : widen(bias[i])));
  }
}

// Few enough outputs at a time that their weights stay near for all rows.
template <class T>
void all_by_output(const RowLinear& call, const float* x, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t last = end - first < kLanes ? end : first + kLanes;
    int64_t row = 0;
    const auto rows_of = [&](auto many) {
      constexpr int kRows = decltype(many)::value;
      for (; row + kRows <= call.rows; row += kRows)
        for (int64_t column = first; column < last; column += kLanes / kRows) by_output<T, kRows>(call, x, row, column, last);
    };
    rows_of(std::integral_constant<int, 4>{});
    rows_of(std::integral_constant<int, 2>{});
    rows_of(std::integral_constant<int, 1>{});
  }
}

template <class T>
inline void columns_of(const RowLinear& call, const float* x, int64_t begin, int64_t end) {
  if (call.by_input) return all_by_input<T>(call, x, begin, end);
  all_by_output<T>(call, x, begin, end);
}

inline void columns(const RowLinear& call, const float* x, int64_t begin, int64_t end) {
  if (call.type == Scalar::BFloat16) return columns_of<BFloat16>(call, x, begin, end);
  if (call.type == Scalar::Half) return columns_of<Half>(call, x, begin, end);
  columns_of<float>(call, x, begin, end);
}

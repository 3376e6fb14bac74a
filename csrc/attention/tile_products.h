// Products of one tile of tree attention: scores of queries and keys, and weighted sums of values. Each instruction set's file
// includes it once, after simd.h.

#if SPECDEC_LANES == 16
constexpr int kRowTile = 6, kColumnTile = 4;  // 24 of 32 registers
#else
constexpr int kRowTile = 4, kColumnTile = 2;  // 8 of 16 registers and room for operands
#endif

// c[i][j] += sum over k of a[i][k] * b[k][offset + j] for ROWS x COLUMNS vectors. Unless null, the same elements of `ahead`
// are prefetched for their next reader.
template <int ROWS, int COLUMNS>
void multiply_tile(const float* a, int64_t lda, const float* const* b, const float* const* ahead, int64_t offset, int64_t count, float* c, int64_t ldc) {
  Floats sum[ROWS][COLUMNS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) sum[i][j] = load(c + i * ldc + j * kLanes);
  for (int64_t k = 0; k < count; ++k) {
    const float* row = b[k] + offset;
    Floats right[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) right[j] = load(row + j * kLanes);
    if (ahead != nullptr) {
      for (int j = 0; j < COLUMNS; ++j) __builtin_prefetch(ahead[k] + offset + j * kLanes);
    }
    for (int i = 0; i < ROWS; ++i) {
      const Floats left = all(a[i * lda + k]);
      for (int j = 0; j < COLUMNS; ++j) sum[i][j] = fma(left, right[j], sum[i][j]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
}

using MultiplyTile = void (*)(const float*, int64_t, const float* const*, const float* const*, int64_t, int64_t, float*, int64_t);

template <int ROWS>
inline MultiplyTile multiply_tile_of(int64_t columns) {
  static_assert(kColumnTile == 2 || kColumnTile == 4);
  if constexpr (kColumnTile == 4) {
    if (columns == 4) return multiply_tile<ROWS, 4>;
    if (columns == 3) return multiply_tile<ROWS, 3>;
  }
  return columns == 2 ? multiply_tile<ROWS, 2> : multiply_tile<ROWS, 1>;
}

inline MultiplyTile multiply_tile_of(int64_t rows, int64_t columns) {
  static_assert(kRowTile == 4 || kRowTile == 6);
  if constexpr (kRowTile == 6) {
    if (rows == 6) return multiply_tile_of<6>(columns);
    if (rows == 5) return multiply_tile_of<5>(columns);
  }
  if (rows == 4) return multiply_tile_of<4>(columns);
  if (rows == 3) return multiply_tile_of<3>(columns);
  return rows == 2 ? multiply_tile_of<2>(columns) : multiply_tile_of<1>(columns);
}

// c += a * b with b given by pointers to its rows. Unless null, `ahead` is prefetched.
inline void multiply(const float* a, int64_t rows, int64_t lda, const float* const* b, const float* const* ahead, int64_t vectors, int64_t count, float* c,
                     int64_t ldc) {
  for (int64_t j = 0; j < vectors; j += kColumnTile) {
    const int64_t columns = vectors - j < kColumnTile ? vectors - j : kColumnTile;
    for (int64_t i = 0; i < rows; i += kRowTile) {
      const int64_t part = rows - i < kRowTile ? rows - i : kRowTile;
      multiply_tile_of(part, columns)(a + i * lda, lda, b, i == 0 ? ahead : nullptr, j * kLanes, count, c + i * ldc + j * kLanes, ldc);
    }
  }
}

// scores[i][k] = query i . key k for ROWS queries and kLanes / ROWS keys at a time; vectors run along the width. Writes
// scores of whole groups of keys, so keys[count...] must be readable up to the end of a group. Unless null, as many rows of
// `ahead` are prefetched.
template <int ROWS>
void dot_tile(const float* query, int64_t width, const float* const* keys, const float* const* ahead, int64_t count, float* scores) {
  constexpr int kKeys = kLanes / ROWS;
  for (int64_t k = 0; k < count; k += kKeys) {
    Floats sum[kLanes] = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats left[ROWS];
      for (int i = 0; i < ROWS; ++i) left[i] = load(query + i * width + d);
      if (ahead != nullptr) {
        for (int j = 0; j < kKeys; ++j) __builtin_prefetch(ahead[k + j] + d);
      }
      for (int j = 0; j < kKeys; ++j) {
        const Floats right = load(keys[k + j] + d);
        for (int i = 0; i < ROWS; ++i) sum[i * kKeys + j] = fma(left[i], right, sum[i * kKeys + j]);
      }
    }
    const Floats result = totals(sum);
    if constexpr (ROWS == 1) {
      store(scores + k, result);
    } else {
      float lanes[kLanes];
      store(lanes, result);
      for (int i = 0; i < ROWS; ++i) __builtin_memcpy(scores + i * kKeyBlock + k, lanes + i * kKeys, kKeys * sizeof(float));
    }
  }
}

inline void dot_scores(const float* query, int64_t rows, int64_t width, const float* const* keys, const float* const* ahead, int64_t count, float* scores) {
  int64_t i = 0;
  const auto fetched = [&] { return i == 0 ? ahead : nullptr; };
  for (; i + 4 <= rows && kLanes >= 8; i += 4) dot_tile<4>(query + i * width, width, keys, fetched(), count, scores + i * kKeyBlock);
  for (; i + 2 <= rows; i += 2) dot_tile<2>(query + i * width, width, keys, fetched(), count, scores + i * kKeyBlock);
  for (; i < rows; ++i) dot_tile<1>(query + i * width, width, keys, fetched(), count, scores + i * kKeyBlock);
}

// Sums over lanes [lane, lane + COUNT) of the width for ROWS queries and kLanes keys; vectors run along the keys.
template <int ROWS, int COUNT>
inline void lane_sums(const float* query, int64_t width, const float* flipped, int64_t lane, Floats* out) {
  if constexpr (COUNT == 4) {
    Floats sum[4][ROWS] = {};
    for (int64_t d = lane; d < width; d += kLanes) {
      for (int l = 0; l < 4; ++l) {
        const Floats right = load(flipped + (d + l) * kKeyBlock);
        for (int i = 0; i < ROWS; ++i) sum[l][i] = fma(all(query[i * width + d + l]), right, sum[l][i]);
      }
    }
    for (int i = 0; i < ROWS; ++i) out[i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
  } else {
    Floats other[ROWS];
    lane_sums<ROWS, COUNT / 2>(query, width, flipped, lane, out);
    lane_sums<ROWS, COUNT / 2>(query, width, flipped, lane + COUNT / 2, other);
    for (int i = 0; i < ROWS; ++i) out[i] = out[i] + other[i];
  }
}

// The scores of dot_scores, with the same bits, from transposed keys [width, kKeyBlock]: faster for many queries.
inline void flipped_scores(const float* query, int64_t rows, int64_t width, const float* flipped, float* scores) {
  constexpr int kRows = kLanes == 16 ? 4 : 2;  // 4 sums each and the sums above them fit into the registers
  for (int64_t k = 0; k < kKeyBlock; k += kLanes) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) {
      Floats result[kRows];
      lane_sums<kRows, kLanes>(query + i * width, width, flipped + k, 0, result);
      for (int r = 0; r < kRows; ++r) store(scores + (i + r) * kKeyBlock + k, result[r]);
    }
    for (; i < rows; ++i) {
      Floats result[1];
      lane_sums<1, kLanes>(query + i * width, width, flipped + k, 0, result);
      store(scores + i * kKeyBlock + k, result[0]);
    }
  }
}

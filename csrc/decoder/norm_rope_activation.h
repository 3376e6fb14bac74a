// Norm, rotary embedding and gated activation of a decoder, for rows [begin, end) of contiguous [rows, ...]. Each instruction
// set's file includes it once, inside its target pragma and namespace, after simd.h. Leftover lanes are computed one by one.

inline void norm(float* stream, const float* added, const float* weight, float* normed, int64_t begin, int64_t end, int64_t hidden, float eps) {
  const int64_t whole = hidden / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    float* h = stream + row * hidden;
    float* to = normed + row * hidden;
    Floats squares{};
    float rest = 0.0f;
    for (int64_t i = 0; i < whole; i += kLanes) {
      Floats value = load(h + i);
      if (added != nullptr) store(h + i, value = value + load(added + row * hidden + i));
      squares = fma(value, value, squares);
    }
    for (int64_t i = whole; i < hidden; ++i) {
      if (added != nullptr) h[i] += added[row * hidden + i];
      rest += h[i] * h[i];
    }
    const float factor = 1.0f / std::sqrt((total(squares) + rest) / static_cast<float>(hidden) + eps);
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(h + i) * all(factor) * load(weight + i));
    for (int64_t i = whole; i < hidden; ++i) to[i] = h[i] * factor * weight[i];
  }
}

inline void rotate(float* qkv, const float* rotary, const int64_t* positions, int64_t begin, int64_t end, int64_t heads, int64_t all_heads, int64_t width) {
  const int64_t half = width / 2, whole = half / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const float *cosine = rotary + positions[row] * width, *sine = cosine + half;
    for (int64_t head = 0; head < heads; ++head) {
      float *low = qkv + (row * all_heads + head) * width, *high = low + half;
      for (int64_t i = 0; i < whole; i += kLanes) {
        const Floats a = load(low + i), b = load(high + i), c = load(cosine + i), s = load(sine + i);
        store(low + i, a * c - b * s);
        store(high + i, b * c + a * s);
      }
      for (int64_t i = whole; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
      }
    }
  }
}

// x / (1 + e^-x), computed with e^-|x| only.
inline Floats silu(Floats x) {
  const Floats small = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? small : all(1.0f)) / (all(1.0f) + small);
}

inline void gate(const float* gate_up, float* gated, int64_t begin, int64_t end, int64_t inner) {
  const int64_t whole = inner / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const float *g = gate_up + row * 2 * inner, *up = g + inner;
    for (int64_t i = 0; i < whole; i += kLanes) store(gated + row * inner + i, silu(load(g + i)) * load(up + i));
    if (whole == inner) continue;
    float some[kLanes] = {};
    for (int64_t i = whole; i < inner; ++i) some[i - whole] = g[i];
    store(some, silu(load(some)));
    for (int64_t i = whole; i < inner; ++i) gated[row * inner + i] = some[i - whole] * up[i];
  }
}

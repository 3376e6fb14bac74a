// Norm, rotary embedding and gated activation of a decoder, for rows [begin, end) of contiguous [rows, ...]. Each instruction
// set's file includes it once, inside its target pragma and namespace, after simd.h. Leftover lanes are computed one by one.

inline void norm(float* stream, const float* added, const float* weight, float* normed, int64_t begin, int64_t end, int64_t hidden, float eps, float offset) {
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
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(h + i) * all(factor) * (load(weight + i) + all(offset)));
    for (int64_t i = whole; i < hidden; ++i) to[i] = h[i] * factor * (weight[i] + offset);
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

// x / (1 + e^-y), computed with e^-|y| only.
inline Floats gated_by(Floats x, Floats y) {
  const Floats small = exponential(y < 0 ? y : -y);
  return x * (y < 0 ? small : all(1.0f)) / (all(1.0f) + small);
}

struct Silu {
  Floats operator()(Floats x) const { return gated_by(x, x); }
};
// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as (1 + tanh z) / 2 = 1 / (1 + e^-2z).
struct GeluTanh {
  Floats operator()(Floats x) const { return gated_by(x, x * (all(1.5957691216f) + all(0.0713548163f) * x * x)); }
};

template <class Function>
inline void gate_by(Function function, const float* gate_up, float* gated, int64_t begin, int64_t end, int64_t inner) {
  const int64_t whole = inner / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const float *g = gate_up + row * 2 * inner, *up = g + inner;
    for (int64_t i = 0; i < whole; i += kLanes) store(gated + row * inner + i, function(load(g + i)) * load(up + i));
    if (whole == inner) continue;
    float some[kLanes] = {};
    for (int64_t i = whole; i < inner; ++i) some[i - whole] = g[i];
    store(some, function(load(some)));
    for (int64_t i = whole; i < inner; ++i) gated[row * inner + i] = some[i - whole] * up[i];
  }
}

inline void gate(Activation activation, const float* gate_up, float* gated, int64_t begin, int64_t end, int64_t inner) {
  if (activation == Activation::GeluTanh) return gate_by(GeluTanh{}, gate_up, gated, begin, end, inner);
  gate_by(Silu{}, gate_up, gated, begin, end, inner);
}

inline void scale(const float* from, float factor, float* to, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i) * all(factor));
  for (int64_t i = whole; i < count; ++i) to[i] = from[i] * factor;
}

// tanh y = sign(y) * (1 - e^-2|y|) / (1 + e^-2|y|). Each lane computes the same, so bits do not depend on `begin`.
inline Floats capped(Floats value, float cap) {
  const Floats y = value / all(cap), small = exponential((y < 0 ? y : -y) + (y < 0 ? y : -y));
  const Floats size = all(cap) * (all(1.0f) - small) / (all(1.0f) + small);
  return y < 0 ? -size : size;
}

inline void cap(float* values, int64_t begin, int64_t end, float limit) {
  const int64_t whole = begin + (end - begin) / kLanes * kLanes;
  for (int64_t i = begin; i < whole; i += kLanes) store(values + i, capped(load(values + i), limit));
  if (whole == end) return;
  float some[kLanes] = {};
  for (int64_t i = whole; i < end; ++i) some[i - whole] = values[i];
  store(some, capped(load(some), limit));
  for (int64_t i = whole; i < end; ++i) values[i] = some[i - whole];
}

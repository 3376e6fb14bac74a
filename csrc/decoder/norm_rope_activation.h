// Norm, rotary embedding and gated activation of a decoder, for rows [begin, end) of contiguous [rows, ...]. Each instruction
// set's file includes it once, inside its target pragma and namespace, after simd.h. T: float or BFloat16; all is computed in
// float32. The last lanes of a row that fill no vector are computed in a vector with zeros.

// A value of the residual stream: rounded to T, as models do that keep it in their type.
template <class T>
inline Floats rounded_to(Floats value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    T some[kLanes];
    store(some, value);
    return load(some);
  }
}

template <class S, class T>
inline void norm_rows(S* stream, const T* added, const T* weight, T* normed, int64_t begin, int64_t end, int64_t hidden, float eps, float offset) {
  for (int64_t row = begin; row < end; ++row) {
    S* h = stream + row * hidden;
    T* to = normed + row * hidden;
    Floats squares{};
    for (int64_t i = 0; i < hidden; i += kLanes) {
      Floats value = load_at(h, i, hidden);
      if (added != nullptr) store_at(h, i, hidden, value = rounded_to<T>(value + load_at(added + row * hidden, i, hidden)));
      squares = fma(value, value, squares);
    }
    const float factor = 1.0f / std::sqrt(total(squares) / static_cast<float>(hidden) + eps);
    for (int64_t i = 0; i < hidden; i += kLanes) {
      store_at(to, i, hidden, rounded_to<T>(load_at(h, i, hidden) * all(factor)) * (load_at(weight, i, hidden) + all(offset)));
    }
  }
}
template <class T>
inline void norm(float* stream, const T* added, const T* weight, T* normed, int64_t begin, int64_t end, int64_t hidden, float eps, float offset) {
  norm_rows(stream, added, weight, normed, begin, end, hidden, eps, offset);
}
template <class T>
inline void norm_in_place(T* rows, const T* weight, int64_t begin, int64_t end, int64_t hidden, float eps, float offset) {
  norm_rows(rows, static_cast<const T*>(nullptr), weight, rows, begin, end, hidden, eps, offset);
}

template <class T>
inline void rotate(T* qkv, const T* rotary, const int64_t* positions, int64_t begin, int64_t end, int64_t heads, int64_t all_heads, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t row = begin; row < end; ++row) {
    const T *cosine = rotary + positions[row] * width, *sine = cosine + half;
    for (int64_t head = 0; head < heads; ++head) {
      T *low = qkv + (row * all_heads + head) * width, *high = low + half;
      for (int64_t i = 0; i < half; i += kLanes) {
        const Floats a = load_at(low, i, half), b = load_at(high, i, half), c = load_at(cosine, i, half), s = load_at(sine, i, half);
        store_at(low, i, half, a * c - b * s);
        store_at(high, i, half, b * c + a * s);
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

template <class T, class Function>
inline void gate_by(Function function, const T* gate_up, T* gated, int64_t begin, int64_t end, int64_t inner) {
  for (int64_t row = begin; row < end; ++row) {
    const T *g = gate_up + row * 2 * inner, *up = g + inner;
    for (int64_t i = 0; i < inner; i += kLanes) store_at(gated + row * inner, i, inner, function(load_at(g, i, inner)) * load_at(up, i, inner));
  }
}

template <class T>
inline void gate(Activation activation, const T* gate_up, T* gated, int64_t begin, int64_t end, int64_t inner) {
  if (activation == Activation::GeluTanh) return gate_by(GeluTanh{}, gate_up, gated, begin, end, inner);
  gate_by(Silu{}, gate_up, gated, begin, end, inner);
}

template <class T>
inline void scale(const T* from, float factor, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_at(to, i, count, rounded_to<T>(load_at(from, i, count) * all(factor)));
}

// tanh y = sign(y) * (1 - e^-2|y|) / (1 + e^-2|y|).
inline Floats capped(Floats value, float cap) {
  const Floats y = value / all(cap), small = exponential((y < 0 ? y : -y) + (y < 0 ? y : -y));
  const Floats size = all(cap) * (all(1.0f) - small) / (all(1.0f) + small);
  return y < 0 ? -size : size;
}

template <class T>
inline void cap(T* values, int64_t begin, int64_t end, float limit) {
  for (int64_t i = begin; i < end; i += kLanes) store_at(values, i, end, capped(load_at(values, i, end), limit));
}

template <class T>
constexpr ElementwiseKernels<T> kElementwise = {norm<T>, norm_in_place<T>, rotate<T>, gate<T>, scale<T>, cap<T>};

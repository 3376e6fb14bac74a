// Vector code of tree_conv. Each instruction set's file includes it once, inside its target pragma and namespace, after
// recurrence_body.h.

// x / (1 + e^-x), by the exponential of -|x|.
inline Floats silu(Floats x) {
  const Floats e = exponential(x < 0 ? x : -x);
  return (x < 0 ? x * e : x) / (all(1.0f) + e);
}

// `count` elements from element `at` on.
inline void widen_part(Operand from, int64_t at, int64_t count, float* to) {
  from.data = static_cast<const char*>(from.data) + at * (from.type == Scalar::Float32 ? 4 : 2);
  widen_elements(from, to, 0, count);
}

// Columns [column, column + count) of all nodes. Scratch: the weights by input, the bias, zeros,
// and the weights by column.
template <class T, int C>
void convolve_tile(const Convolution& call, const int32_t* sources, int64_t column, int64_t count, float* scratch) {
  constexpr int64_t kWidth = C * kLanes;
  const int64_t held = call.reach - 1;
  float *bias = scratch + call.reach * kWidth, *zeros = bias + kWidth, *lined = zeros + kWidth;
  for (int64_t i = 0; i < (call.reach + 2) * kWidth; ++i) scratch[i] = 0.0f;
  widen_part(call.weight, column * call.reach, count * call.reach, lined);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < call.reach; ++at) scratch[at * kWidth + i] = lined[i * call.reach + at];
  if (call.bias.data != nullptr) widen_part(call.bias, column, count, bias);
  const T *none = reinterpret_cast<const T*>(zeros), *inputs = static_cast<const T*>(call.inputs.data) + column;
  for (int64_t b = 0; b < call.trees.batch; ++b) {
    const int64_t first = call.trees.offsets[b], last = call.trees.offsets[b + 1];
    if (first == last) continue;
    T* window = static_cast<T*>(call.window) + call.trees.rows[b] * call.row_stride + column;
    const auto source_of = [&](int32_t source) {
      if (source >= 0) return inputs + source * call.channels;
      return call.trees.lengths[b] == 0 ? none : window + window_row(source) * call.channels;
    };
    for (int64_t node = first; node < last; ++node) {
      Floats sums[C];
      for (int c = 0; c < C; ++c) sums[c] = load(bias + c * kLanes);
      for (int64_t at = 0; at < call.reach; ++at) {
        const T* from = source_of(at < held ? sources[node * held + at] : static_cast<int32_t>(node));
        for (int c = 0; c < C; ++c) sums[c] = fma(load_at(from, c * kLanes, count), load(scratch + at * kWidth + c * kLanes), sums[c]);
      }
      T* to = static_cast<T*>(call.outputs) + node * call.channels + column;
      for (int c = 0; c < C; ++c) store_at(to, c * kLanes, count, call.silu ? silu(sums[c]) : sums[c]);
    }
    // The inputs of the last node but the oldest, in an order in which nothing is overwritten unread.
    for (int64_t i = 0; call.advance && i < held; ++i) {
      const T* from = source_of(i + 1 < held ? sources[(last - 1) * held + i + 1] : static_cast<int32_t>(last - 1));
      __builtin_memmove(window + i * call.channels, from, static_cast<size_t>(count) * sizeof(T));
    }
  }
}

template <class T>
inline void convolve_tiles(const Convolution& call, const int32_t* sources, int64_t begin, int64_t end, float* scratch) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t column = tile * kTile, count = call.channels - column < kTile ? call.channels - column : kTile;
    if (count > 2 * kLanes) {
      convolve_tile<T, 4>(call, sources, column, count, scratch);
    } else if (count > kLanes) {
      convolve_tile<T, 2>(call, sources, column, count, scratch);
    } else {
      convolve_tile<T, 1>(call, sources, column, count, scratch);
    }
  }
}
inline void convolve(const Convolution& call, const int32_t* sources, int64_t begin, int64_t end, float* scratch) {
  if (call.inputs.type == Scalar::Float32) convolve_tiles<float>(call, sources, begin, end, scratch);
  if (call.inputs.type == Scalar::BFloat16) convolve_tiles<BFloat16>(call, sources, begin, end, scratch);
  if (call.inputs.type == Scalar::Half) convolve_tiles<Half>(call, sources, begin, end, scratch);
}

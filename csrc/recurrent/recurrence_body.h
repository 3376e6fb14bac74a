// Vector code of linear recurrences. Each instruction set's file includes it once, inside its target pragma and namespace,
// after simd.h. A tile is up to kVectors vectors of columns of one head. Columns are independent and all go through the same
// instructions; lanes beyond the last column are zeros in scratch memory.

constexpr int kVectors = 4;
constexpr int64_t kTile = kVectors * kLanes;

// Rows of a tile; stride: floats between them.
struct Rows {
  float* data;
  int64_t stride;
};

// e^x: 0 below -87.3, infinity above 88.3; NaN stays NaN.
inline Floats factor_of(Floats x) {
  const Floats value = x > all(88.3f) ? all(__builtin_inff()) : exponential(x > all(88.3f) ? Floats{} : x);
  return x != x ? x : value;
}

template <class T, class Function>
inline void each_vector(const T* from, float* to, int64_t begin, int64_t end, const Function& function) {
  for (int64_t i = begin; i < end; i += kLanes) store_at(to, i, end, function(load_at(from, i, end)));
}
template <class Function>
inline void each_vector_of(Operand from, float* to, int64_t begin, int64_t end, const Function& function) {
  if (from.type == Scalar::Float32) each_vector(static_cast<const float*>(from.data), to, begin, end, function);
  if (from.type == Scalar::BFloat16) each_vector(static_cast<const BFloat16*>(from.data), to, begin, end, function);
  if (from.type == Scalar::Half) each_vector(static_cast<const Half*>(from.data), to, begin, end, function);
}
inline void widen_elements(Operand from, float* to, int64_t begin, int64_t end) {
  each_vector_of(from, to, begin, end, [](Floats x) { return x; });
}
inline void exponentials(Operand from, float* to, int64_t begin, int64_t end) {
  each_vector_of(from, to, begin, end, [](Floats x) { return factor_of(x); });
}
inline void dots(const float* a, const float* b, float* to, int64_t begin, int64_t end, int64_t size) {
  for (int64_t row = begin; row < end; ++row) {
    Floats sum{};
    for (int64_t k = 0; k < size; k += kLanes) sum = fma(load_at(a + row * size, k, size), load_at(b + row * size, k, size), sum);
    to[row] = total(sum);
  }
}

// `count` columns of a tensor from element `at` on.
template <int C, class T>
inline void load_typed(const T* from, int64_t count, Floats* to) {
  if (__builtin_expect(count == C * kLanes, 1)) {
    for (int c = 0; c < C; ++c) to[c] = load(from + c * kLanes);
  } else {
    for (int c = 0; c < C; ++c) to[c] = load_at(from, c * kLanes, count);
  }
}
template <int C, class T>
inline void store_typed(T* to, int64_t count, const Floats* from) {
  if (__builtin_expect(count == C * kLanes, 1)) {
    for (int c = 0; c < C; ++c) store(to + c * kLanes, from[c]);
  } else {
    for (int c = 0; c < C; ++c) store_at(to, c * kLanes, count, from[c]);
  }
}
template <int C>
inline void load_columns(Operand from, int64_t at, int64_t count, Floats* to) {
  if (from.type == Scalar::Float32) return load_typed<C>(static_cast<const float*>(from.data) + at, count, to);
  if (from.type == Scalar::BFloat16) return load_typed<C>(static_cast<const BFloat16*>(from.data) + at, count, to);
  load_typed<C>(static_cast<const Half*>(from.data) + at, count, to);
}
template <int C>
inline void store_columns(void* to, Scalar type, int64_t at, int64_t count, const Floats* from) {
  if (type == Scalar::Float32) return store_typed<C>(static_cast<float*>(to) + at, count, from);
  if (type == Scalar::BFloat16) return store_typed<C>(static_cast<BFloat16*>(to) + at, count, from);
  store_typed<C>(static_cast<Half*>(to) + at, count, from);
}

// Keeps compilers from loading a vector twice that two instructions read.
inline Floats in_register(Floats value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#endif
  return value;
}

template <int C>
inline void fetch(const float* row) {
  constexpr int kLine = 16 / kLanes;  // vectors of a cache line
  for (int c = 0; c < C; c += kLine) __builtin_prefetch(row + c * kLanes, 0, 2);  // to the L2 cache: a tile in memory fits into few sets of L1
}

// Sums over the rows of a state, times key and times query. FAR: the state comes from memory, and a part of the next one is
// prefetched, from `ahead`. COPIES: it is copied too.
template <int C, bool FAR, bool COPIES>
inline void products(Rows from, Rows copy, int64_t keys, const float* key, const float* query, Rows ahead, Floats* by_key, Floats* by_query) {
  Floats a[C], b[C];
  for (int c = 0; c < C; ++c) a[c] = b[c] = Floats{};
  const float* row = from.data;
  for (int64_t k = 0; k < keys; ++k, row += from.stride) {
    const Floats own_key = all(key[k]), own_query = all(query[k]);
    if constexpr (FAR) fetch<C>(ahead.data + k * ahead.stride);
    for (int c = 0; c < C; ++c) {
      const Floats s = in_register(load(row + c * kLanes));
      if constexpr (COPIES) store(copy.data + k * copy.stride + c * kLanes, s);
      a[c] = fma(own_key, s, a[c]);
      b[c] = fma(own_query, s, b[c]);
    }
  }
  for (int c = 0; c < C; ++c) by_key[c] = a[c], by_query[c] = b[c];
}

// What the gate of a node is made of: a factor, one per row, or for Gate::Element the node's steps.
template <int C>
struct NodeGate {
  const float* factors;
  Floats step[C];
  Rows decay;
};
// Factors of C vectors of row k. `whole` is that of the node for Gate::Head.
template <int C, Gate G>
inline void gates_at(const NodeGate<C>& gate, Floats whole, int64_t k, Floats* to) {
  const Floats row = G == Gate::Channel ? all(gate.factors[k]) : whole;
  for (int c = 0; c < C; ++c) {
    to[c] = row;
    if constexpr (G == Gate::Element) to[c] = factor_of(gate.step[c] * load(gate.decay.data + k * gate.decay.stride + c * kLanes));
  }
}

// The state of a node, gate * parent + key * added, and its products with the query.
template <int C, Gate G, bool STORES, bool SUMS>
inline void update(Rows from, Rows to, int64_t keys, const NodeGate<C>& gate, const float* key, const float* query, const Floats* added, Rows ahead, Floats* out) {
  Floats u[C], sums[C];
  for (int c = 0; c < C; ++c) u[c] = added[c], sums[c] = Floats{};
  const Floats whole = G == Gate::Head ? all(gate.factors[0]) : Floats{};
  const float* row = from.data;
  float* into = to.data;
  for (int64_t k = 0; k < keys; ++k, row += from.stride, into += to.stride) {
    const Floats own_key = all(key[k]), own_query = SUMS ? all(query[k]) : Floats{};
    Floats gates[C];
    gates_at<C, G>(gate, whole, k, gates);
    if constexpr (SUMS) fetch<C>(ahead.data + k * ahead.stride);
    for (int c = 0; c < C; ++c) {
      const Floats s = fma(own_key, u[c], gates[c] * load(row + c * kLanes));
      if constexpr (STORES) store(into + c * kLanes, s);
      if constexpr (SUMS) sums[c] = fma(own_query, s, sums[c]);
    }
  }
  if constexpr (SUMS)
    for (int c = 0; c < C; ++c) out[c] = sums[c];
}

// Where a tile of one request is, and scratch memory in the order of its use.
struct Place {
  int64_t head, column, count;
  Rows committed;  // the state in memory
  Rows ahead;      // another that will be read next
  bool fresh;
  float* scratch;
};

// Takes scratch memory for `count` states.
template <int C>
inline Rows take(Place& place, int64_t count, int64_t keys) {
  const Rows rows{place.scratch, C * kLanes};
  place.scratch += count * keys * C * kLanes;
  return rows;
}
// Copies the columns of the tile into C vectors.
template <int C>
inline void copy_columns(const Place& place, Rows from, Rows to, int64_t keys, bool zeros) {
  for (int64_t k = 0; k < keys; ++k)
    for (int c = 0; c < C; ++c) store(to.data + k * to.stride + c * kLanes, zeros ? Floats{} : load_at(from.data + k * from.stride, c * kLanes, place.count));
}
template <int C>
inline Rows whole_decay(Place& place, const PreparedRecurrence& r) {
  const Rows from{const_cast<float*>(r.decay) + place.head * r.keys * r.width + place.column, r.width};
  if (place.count == C * kLanes) return from;
  const Rows rows = take<C>(place, 1, r.keys);
  copy_columns<C>(place, from, rows, r.keys, false);
  return rows;
}
template <int C>
inline void write_back(const Place& place, Rows from, int64_t keys) {
  if (from.data == place.committed.data) return;
  for (int64_t k = 0; k < keys; ++k)
    for (int c = 0; c < C; ++c) store_at(place.committed.data + k * place.committed.stride, c * kLanes, place.count, load(from.data + k * from.stride + c * kLanes));
}

template <int C, Gate G>
inline NodeGate<C> gate_of(const PreparedRecurrence& r, int64_t node, const Place& place, Rows decay) {
  const int64_t at = node * r.heads + place.head;
  NodeGate<C> gate{r.gate + (G == Gate::Channel ? (place.head * r.nodes + node) * r.keys : at), {}, decay};
  if constexpr (G == Gate::Element) load_columns<C>({r.gate, Scalar::Float32}, at * r.width + place.column, place.count, gate.step);
  return gate;
}

template <int C, Gate G, bool DELTA>
void walk_tile(const PreparedRecurrence& r, const Visits& plan, const Request& request, Place place) {
  const int64_t keys = r.keys, group = place.head / (r.heads / r.groups);
  const bool whole = place.count == C * kLanes, several = request.last - request.first > 1;
  const Rows buffers = take<C>(place, plan.buffers, keys);
  const auto rows_of = [&](int32_t buffer) { return Rows{buffers.data + buffer * keys * buffers.stride, buffers.stride}; };
  // Buffer 0 begins as the state in memory. A whole tile is copied when it is read first, if it is read again.
  bool in_memory = whole && !place.fresh;
  if (!in_memory) copy_columns<C>(place, place.committed, buffers, keys, place.fresh);
  Rows decay{}, last{};
  if constexpr (G == Gate::Element) decay = whole_decay<C>(place, r);
  float* scaled = place.scratch;  // key and query times the gate
  for (int64_t i = request.first; i < request.last; ++i) {
    const Visit visit = plan.visits[static_cast<size_t>(i)];
    const int64_t own = visit.node * r.heads + place.head, at = own * r.width + place.column;
    const int64_t shared = group * r.nodes + visit.node;
    const float *key = r.key + shared * keys, *query = r.query + shared * keys;
    const bool stores = visit.to != kDropped;
    // A state that is committed goes to memory at once if its tile is whole.
    const Rows to = visit.to >= 0 ? rows_of(visit.to) : whole ? place.committed : buffers;
    Rows from = in_memory ? place.committed : rows_of(visit.from);
    const NodeGate<C> gate = gate_of<C, G>(r, visit.node, place, decay);
    Floats value[C], out[C];
    load_columns<C>(r.value, at, place.count, value);
    if constexpr (DELTA) {
      Floats by_key[C];
      const float *key_of = key, *query_of = query;
      if constexpr (G == Gate::Channel) {
        for (int64_t k = 0; k < keys; ++k) scaled[k] = key[k] * gate.factors[k], scaled[keys + k] = query[k] * gate.factors[k];
        key_of = scaled, query_of = scaled + keys;
      }
      if (in_memory && several) {
        products<C, true, true>(from, buffers, keys, key_of, query_of, place.ahead, by_key, out);
        from = buffers;
      } else if (in_memory) {
        products<C, true, false>(from, buffers, keys, key_of, query_of, place.ahead, by_key, out);
      } else {
        products<C, false, false>(from, buffers, keys, key_of, query_of, place.ahead, by_key, out);
      }
      const Floats factor = all(G == Gate::Head ? gate.factors[0] : 1.0f), rate = all(r.rate[own]), dot = all(r.dot[shared]);
      for (int c = 0; c < C; ++c) {
        value[c] = rate * (value[c] - factor * by_key[c]);  // the correction
        out[c] = fma(dot, value[c], factor * out[c]);
      }
      store_columns<C>(r.corrections, Scalar::Float32, at, place.count, value);
      if (stores) update<C, G, true, false>(from, to, keys, gate, key, query, value, place.ahead, out);
    } else {
      if (in_memory && several && visit.to != 0) {  // other roots need the state
        copy_columns<C>(place, from, buffers, keys, false);
        from = buffers;
      }
      if (stores) {
        update<C, G, true, true>(from, to, keys, gate, key, query, value, place.ahead, out);
      } else {
        update<C, G, false, true>(from, to, keys, gate, key, query, value, place.ahead, out);
      }
    }
    in_memory = false;
    store_columns<C>(r.outputs, r.value.type, at, place.count, out);
    if (visit.to == kCommitted) last = to;
  }
  if (last.data != nullptr) write_back<C>(place, last, keys);
}

// All nodes of a path at once for each row of the state.
template <int C, Gate G>
void replay_tile(const PreparedRecurrence& r, const Visits& plan, const Request& request, Place place) {
  const int64_t keys = r.keys, group = place.head / (r.heads / r.groups), nodes = request.last - request.first;
  const bool whole = place.count == C * kLanes;
  const Rows padded = take<C>(place, 1, keys), before = whole && !place.fresh ? place.committed : padded, to = whole ? place.committed : padded;
  if (before.data == padded.data) copy_columns<C>(place, place.committed, padded, keys, place.fresh);
  Rows decay{};
  if constexpr (G == Gate::Element) decay = whole_decay<C>(place, r);
  float *added = place.scratch, *steps = added + nodes * C * kLanes;
  const Visit* visits = plan.visits.data() + request.first;
  for (int64_t i = 0; i < nodes; ++i) {
    Floats value[C];
    load_columns<C>(r.value, (visits[i].node * r.heads + place.head) * r.width + place.column, place.count, value);
    const NodeGate<C> gate = gate_of<C, G>(r, visits[i].node, place, decay);
    for (int c = 0; c < C; ++c) {
      store(added + (i * C + c) * kLanes, value[c]);
      if constexpr (G == Gate::Element) store(steps + (i * C + c) * kLanes, gate.step[c]);
    }
  }
  for (int64_t k = 0; k < keys; ++k) {
    Floats s[C];
    for (int c = 0; c < C; ++c) s[c] = load(before.data + k * before.stride + c * kLanes);
    fetch<C>(place.ahead.data + k * place.ahead.stride);
    for (int64_t i = 0; i < nodes; ++i) {
      const int64_t node = visits[i].node;
      NodeGate<C> gate{r.gate + (G == Gate::Channel ? (place.head * r.nodes + node) * keys : node * r.heads + place.head), {}, decay};
      const Floats key = all(r.key[(group * r.nodes + node) * keys + k]);
      if constexpr (G == Gate::Element)
        for (int c = 0; c < C; ++c) gate.step[c] = load(steps + (i * C + c) * kLanes);
      Floats gates[C];
      gates_at<C, G>(gate, all(gate.factors[0]), k, gates);
      for (int c = 0; c < C; ++c) s[c] = fma(key, load(added + (i * C + c) * kLanes), gates[c] * s[c]);
    }
    for (int c = 0; c < C; ++c) store(to.data + k * to.stride + c * kLanes, s[c]);
  }
  write_back<C>(place, to, keys);
}

// function(vectors, request, place) for tiles [begin, end) of all requests; vectors: an integral constant. The tiles of one
// head and request follow each other. Each prefetches a contiguous part of the next state, as memory is read fastest.
template <class Function>
inline void each_tile(const PreparedRecurrence& r, const Visits& plan, int64_t begin, int64_t end, float* scratch, const Function& function) {
  const int64_t per_head = (r.width + kTile - 1) / kTile, requests = static_cast<int64_t>(plan.requests.size());
  const auto state_of = [&](int64_t head, int64_t i) { return r.state + plan.requests[static_cast<size_t>(i)].row * r.row_stride + head * r.keys * r.width; };
  for (int64_t head = begin / per_head; head * per_head < end; ++head) {
    const int64_t first = begin > head * per_head ? begin - head * per_head : 0, last = end < (head + 1) * per_head ? end - head * per_head : per_head;
    for (int64_t i = 0; i < requests; ++i) {
      const Request& request = plan.requests[static_cast<size_t>(i)];
      float* next = i + 1 < requests ? state_of(head, i + 1) : state_of((head + 1) * per_head < end ? head + 1 : head, 0);
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t column = tile * kTile, count = r.width - column < kTile ? r.width - column : kTile;
        const Rows own{state_of(head, i) + column, r.width}, ahead{next + column * r.keys, count};
        const Place place{head, column, count, own, ahead, request.fresh, scratch};
        if (count > 3 * kLanes) {
          function(std::integral_constant<int, 4>{}, request, place);
        } else if (count > 2 * kLanes) {
          function(std::integral_constant<int, 3>{}, request, place);
        } else if (count > kLanes) {
          function(std::integral_constant<int, 2>{}, request, place);
        } else {
          function(std::integral_constant<int, 1>{}, request, place);
        }
      }
    }
  }
}

template <Gate G, bool DELTA>
void walk_tiles(const PreparedRecurrence& r, const Visits& plan, int64_t begin, int64_t end, float* scratch) {
  each_tile(r, plan, begin, end, scratch, [&](auto vectors, const Request& request, const Place& place) {
    walk_tile<decltype(vectors)::value, G, DELTA>(r, plan, request, place);
  });
}
inline void walk(const PreparedRecurrence& r, const Visits& plan, int64_t begin, int64_t end, float* scratch) {
  if (r.kind == Gate::Element) return walk_tiles<Gate::Element, false>(r, plan, begin, end, scratch);
  if (r.kind == Gate::Channel) return r.rate != nullptr ? walk_tiles<Gate::Channel, true>(r, plan, begin, end, scratch) : walk_tiles<Gate::Channel, false>(r, plan, begin, end, scratch);
  r.rate != nullptr ? walk_tiles<Gate::Head, true>(r, plan, begin, end, scratch) : walk_tiles<Gate::Head, false>(r, plan, begin, end, scratch);
}

template <Gate G>
void replay_tiles(const PreparedRecurrence& r, const Visits& plan, int64_t begin, int64_t end, float* scratch) {
  each_tile(r, plan, begin, end, scratch, [&](auto vectors, const Request& request, const Place& place) {
    replay_tile<decltype(vectors)::value, G>(r, plan, request, place);
  });
}
inline void replay(const PreparedRecurrence& r, const Visits& plan, int64_t begin, int64_t end, float* scratch) {
  if (r.kind == Gate::Element) return replay_tiles<Gate::Element>(r, plan, begin, end, scratch);
  if (r.kind == Gate::Channel) return replay_tiles<Gate::Channel>(r, plan, begin, end, scratch);
  replay_tiles<Gate::Head>(r, plan, begin, end, scratch);
}

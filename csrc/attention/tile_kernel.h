// One tile of tree attention: scores [queries, kKeyBlock] of a block of keys, online softmax, weighted sum of values
// [queries, D]. Each instruction set's file includes it once, after simd.h and tile_products.h.
//
// Batch invariant: the order of every sum depends only on the number of keys before a key that the node sees, and the width.
// A node has the same bits whatever nodes, heads or rows share the call, and the same as at the end of a chain of its
// ancestors. Only trees of more than 64 nodes (Tile::wide) have branches whose keys are added in the order of slots.

constexpr int64_t kAhead = 4;  // slots to prefetch: they are too far apart for the hardware prefetcher
constexpr float kNegativeInfinity = -__builtin_inff();

// Copies `width` elements as floats and fills up to `total_width` with zeros.
template <class T>
inline void widen_row(const T* from, int64_t width, int64_t total_width, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(to + d, load(from + d));
  for (; d < width; ++d) to[d] = widen(from[d]);
  for (; d < total_width; ++d) to[d] = 0.0f;
}

// Pointers to the rows of slots [begin, begin + count): copies in `memory` as floats, or the cache itself if `in_place` and
// it holds floats of the padded width. Slots are often 4 KiB apart and then conflict in the L1 cache, so rows that many
// queries read are copied.
template <class T>
inline void gather_rows(const T* cache, int64_t page_stride, int64_t slot_stride, const AttentionArguments& a, const int32_t* table,
                        int64_t begin, int64_t count, int64_t width, bool in_place, float* memory, const float** rows) {
  const T* slots[kKeyBlock];
  int64_t page = begin / a.page_size, slot = begin % a.page_size;
  const T* base = cache + table[page] * page_stride;
  for (int64_t t = 0; t < count; ++t, ++slot) {
    if (slot == a.page_size) {
      slot = 0;
      base = cache + table[++page] * page_stride;
    }
    slots[t] = base + slot * slot_stride;
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    if (in_place && width == a.head_dim) {
      for (int64_t t = 0; t < count; ++t) rows[t] = slots[t];
      return;
    }
  }
  const int64_t bytes = a.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t t = 0; t < count; ++t) {
    if (t + kAhead < count) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(slots[t + kAhead]) + at);
    }
    widen_row(slots[t], a.head_dim, width, memory + t * width);
    rows[t] = memory + t * width;
  }
}

// Online softmax of one block for one query: turns scores into weights and updates the query's state. A score of NaN or +inf
// makes the query's whole result NaN.
inline void soften(float* scores, uint64_t visible, float softcap, float* max, float* sum, float* acc, int64_t width) {
  constexpr int kParts = kKeyBlock / kLanes;
  Floats part[kParts];
  Floats highest = all(kNegativeInfinity), flaw = {};
  for (int p = 0; p < kParts; ++p) {
    const Floats score = load(scores + p * kLanes);
    part[p] = softcap != 0.0f ? all(softcap) * hyperbolic_tangent(score / all(softcap)) : score;
    part[p] = score == score ? part[p] : score;  // tanh hides NaN
    part[p] = keep(part[p], static_cast<uint32_t>(visible >> (p * kLanes)), all(kNegativeInfinity));
    flaw += larger(Floats{}, part[p]) * all(0.0f);
    highest = larger(part[p], highest);
  }
  if (!(total(flaw) == 0.0f)) {
    const float nan = __builtin_nanf("");
    for (int p = 0; p < kParts; ++p) store(scores + p * kLanes, Floats{});
    for (int64_t d = 0; d < width; d += kLanes) store(acc + d, all(nan));
    *sum = nan;
    *max = -kNegativeInfinity;  // above all later scores, which then add 0
    return;
  }
  const float block_max = largest(highest);
  const float next = block_max > *max ? block_max : *max;
  if (next == kNegativeInfinity) {  // no visible key so far
    for (int p = 0; p < kParts; ++p) store(scores + p * kLanes, Floats{});
    return;
  }
  if (next != *max) {
    const Floats factor = exponential(all(*max - next));
    *sum *= factor[0];
    for (int64_t d = 0; d < width; d += kLanes) store(acc + d, load(acc + d) * factor);
    *max = next;
  }
  Floats weights = {};
  for (int p = 0; p < kParts; ++p) {
    const Floats weight = exponential(part[p] - all(next));
    weights += weight;
    store(scores + p * kLanes, weight);
  }
  *sum += total(weights);
}

// The block with the first node and all later slots of a row: its values, all scores, and weights of one block of keys.
struct Tail {
  int64_t begin, count;  // slots
  float *scores, *weights;  // [2, queries, kKeyBlock]
  const float* values[2 * kKeyBlock];
};

// One block of keys of a row with branches. Every node has its keys in the places of a chain of its ancestors while they are
// weighed. Values are then added in the order of slots, which is the same order.
inline void attend_tail(const AttentionArguments& a, const Tile& tile, int64_t block, const Tail& tail, int64_t width, float* scores, Partial state) {
  const int64_t group = a.heads / a.kv_heads, piece = tile.count * group * kKeyBlock;
  uint64_t any = 0;
  __builtin_memset(tail.weights, 0, static_cast<size_t>(2 * piece) * sizeof(float));
  for (int64_t node = 0; node < tile.count; ++node) {
    int64_t slots[kKeyBlock];
    uint64_t visible;
    const int64_t count = places_of_keys(a, tile.row, tile.first + node, block, slots, visible);
    any |= visible;
    if (visible == 0) continue;
    for (int64_t t = 0; t < count; ++t) slots[t] = (slots[t] - tail.begin) / kKeyBlock * piece + (slots[t] - tail.begin) % kKeyBlock;
    for (int64_t r = node * group; r < (node + 1) * group; ++r) {
      for (int64_t t = 0; t < count; ++t) scores[t] = tail.scores[slots[t] + r * kKeyBlock];
      for (int64_t t = count; t < kKeyBlock; ++t) scores[t] = 0.0f;
      soften(scores, visible, static_cast<float>(a.softcap), state.max + r, state.sum + r, state.acc + r * width, width);
      for (int64_t t = 0; t < count; ++t) tail.weights[slots[t] + r * kKeyBlock] = scores[t];
    }
  }
  for (int64_t at = 0; any != 0 && at < tail.count; at += kKeyBlock) {
    const int64_t part = tail.count - at < kKeyBlock ? tail.count - at : kKeyBlock;
    multiply(tail.weights + at / kKeyBlock * piece, tile.count * group, kKeyBlock, tail.values + at, nullptr, width / kLanes, part, state.acc, width);
  }
}

template <class T>
void attend_typed(const AttentionArguments& a, const Tile& tile, const Tile* following, float* scratch, Partial state) {
  const int64_t group = a.heads / a.kv_heads, rows = tile.count * group, width = padded(a.head_dim, kLanes);
  float* query = scratch;
  float* scores = query + rows * width;
  float* flipped = scores + rows * kKeyBlock;
  float* key_memory = flipped + kKeyBlock * width;
  float* value_memory = key_memory + kKeyBlock * width;
  const T* queries = static_cast<const T*>(a.query) + (a.offsets[tile.row] + tile.first) * a.query_node + tile.kv_head * group * a.query_head;
  const Floats scale = all(static_cast<float>(a.scale));
  for (int64_t r = 0; r < rows; ++r) {
    float* to = query + r * width;
    widen_row(queries + r / group * a.query_node + r % group * a.query_head, a.head_dim, width, to);
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(to + d) * scale);
    state.max[r] = kNegativeInfinity;
    state.sum[r] = 0.0f;
  }
  __builtin_memset(state.acc, 0, static_cast<size_t>(rows * width) * sizeof(float));

  const T* keys = static_cast<const T*>(a.keys) + tile.kv_head * a.key_head;
  const T* values = static_cast<const T*>(a.values) + tile.kv_head * a.value_head;
  const int32_t* table = a.page_table + tile.row * a.pages_per_row;
  const float *key_rows[kKeyBlock], *value_rows[kKeyBlock], *next_rows[kKeyBlock];
  const float softcap = static_cast<float>(a.softcap);
  const bool in_place = rows <= 32;
  const bool ahead = in_place && std::is_same_v<T, float> && width == a.head_dim;  // row addresses are known before the reads
  const int64_t length = a.lengths[tile.row];
  bool branches = false;
  if (!tile.wide && a.ancestors != nullptr) {
    for (int64_t i = 0; i < tile.count; ++i) branches |= on_branch(a, tile.row, tile.first + i);
  }
  Tail tail = {length / kKeyBlock * kKeyBlock, 0, value_memory + kKeyBlock * width, nullptr, {}};
  if (branches && tile.key_end > tail.begin) {
    tail.count = length + a.offsets[tile.row + 1] - a.offsets[tile.row] - tail.begin;
    tail.weights = tail.scores + 2 * rows * kKeyBlock;
    float* memory = tail.weights + 2 * rows * kKeyBlock;
    for (int64_t at = 0; at < tail.count; at += kKeyBlock, memory += kKeyBlock * width) {
      const int64_t part = tail.count - at < kKeyBlock ? tail.count - at : kKeyBlock;
      gather_rows(keys, a.key_page, a.key_slot, a, table, tail.begin + at, part, width, in_place, key_memory, key_rows);
      for (int64_t t = part; t < kKeyBlock; ++t) key_rows[t] = key_rows[part - 1];  // scored, then not read
      dot_scores(query, rows, width, key_rows, nullptr, part, tail.scores + at * rows);
      gather_rows(values, a.value_page, a.value_slot, a, table, tail.begin + at, part, width, in_place, memory, tail.values + at);
    }
  }
  for (int64_t block = tile.key_begin / kKeyBlock * kKeyBlock; block < tile.key_end; block += kKeyBlock) {
    if (branches && block >= tail.begin) {
      attend_tail(a, tile, block, tail, width, scores, state);
      continue;
    }
    const int64_t count = tile.key_end - block < kKeyBlock ? tile.key_end - block : kKeyBlock;
    uint64_t any = 0;
    uint64_t visible[kMostNodes];
    for (int64_t i = 0; i < tile.count; ++i) any |= visible[i] = visible_keys(a, tile.row, tile.first + i, block, count);
    if (any == 0) continue;
    gather_rows(keys, a.key_page, a.key_slot, a, table, block, count, width, in_place, key_memory, key_rows);
    for (int64_t t = count; t < kKeyBlock; ++t) key_rows[t] = key_rows[count - 1];  // scored, then masked
    if (ahead) {
      gather_rows(values, a.value_page, a.value_slot, a, table, block, count, width, true, value_memory, value_rows);
      for (int64_t t = count; t < kKeyBlock; ++t) value_rows[t] = value_rows[count - 1];
    }
    if (tile.wide) {
      for (int64_t d = 0; d < width; d += kLanes) {
        for (int64_t k = 0; k < kKeyBlock; k += kLanes) {
          Floats square[kLanes];
          for (int i = 0; i < kLanes; ++i) square[i] = load(key_rows[k + i] + d);
          transpose(square);
          for (int i = 0; i < kLanes; ++i) store(flipped + (d + i) * kKeyBlock + k, square[i]);
        }
      }
      flipped_scores(query, rows, width, flipped, scores);
    } else {
      dot_scores(query, rows, width, key_rows, ahead ? value_rows : nullptr, count, scores);
    }
    for (int64_t r = 0; r < rows; ++r) {
      soften(scores + r * kKeyBlock, visible[r / group], softcap, state.max + r, state.sum + r, state.acc + r * width, width);
    }
    const int64_t next = block + kKeyBlock;
    bool more = ahead && next < tile.key_end;
    if (more) {
      const int64_t left = tile.key_end - next < count ? tile.key_end - next : count;
      gather_rows(keys, a.key_page, a.key_slot, a, table, next, left, width, true, key_memory, next_rows);
      for (int64_t t = left; t < count; ++t) next_rows[t] = next_rows[left - 1];
    } else if (ahead && following != nullptr) {
      const T* other = static_cast<const T*>(a.keys) + following->kv_head * a.key_head;
      const int64_t left = following->key_end - following->key_begin < kKeyBlock ? following->key_end - following->key_begin : kKeyBlock;
      const float* rows_of[kKeyBlock];
      gather_rows(other, a.key_page, a.key_slot, a, a.page_table + following->row * a.pages_per_row, following->key_begin, left, width, true, key_memory, rows_of);
      for (int64_t t = 0; t < left; ++t)
        for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(rows_of[t] + d, 0, 2);
    }
    if (!ahead) gather_rows(values, a.value_page, a.value_slot, a, table, block, count, width, in_place, value_memory, value_rows);
    multiply(scores, rows, kKeyBlock, value_rows, more ? next_rows : nullptr, width / kLanes, count, state.acc, width);
  }
}

void attend(const AttentionArguments& a, const Tile& tile, const Tile* following, float* scratch, Partial state) {
  switch (a.type) {
    case Scalar::BFloat16:
      return attend_typed<BFloat16>(a, tile, following, scratch, state);
    case Scalar::Half:
      return attend_typed<Half>(a, tile, following, scratch, state);
    default:
      return attend_typed<float>(a, tile, following, scratch, state);
  }
}

// Adds the state over later keys. Calls must be in key order.
void merge(int64_t rows, int64_t width, Partial into, Partial from) {
  for (int64_t r = 0; r < rows; ++r) {
    const float next = into.max[r] > from.max[r] ? into.max[r] : from.max[r];
    if (next == kNegativeInfinity) continue;
    const Floats mine = exponential(all(into.max[r] - next)), theirs = exponential(all(from.max[r] - next));
    into.sum[r] = into.sum[r] * mine[0] + from.sum[r] * theirs[0];
    into.max[r] = next;
    float* to = into.acc + r * width;
    const float* other = from.acc + r * width;
    for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(to + d) * mine + load(other + d) * theirs);
  }
}

template <class T>
inline void write_row(const float* from, Floats factor, int64_t width, T* to) {
  float lanes[kLanes];
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t count = width - d < kLanes ? width - d : kLanes;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (count == kLanes) {
        store(to + d, load(from + d) * factor);
        continue;
      }
    }
    store(lanes, load(from + d) * factor);
    for (int64_t i = 0; i < count; ++i) to[d + i] = narrow<T>(lanes[i]);
  }
}

void finish(const AttentionArguments& a, const Tile& tile, Partial state) {
  const int64_t group = a.heads / a.kv_heads, width = padded(a.head_dim, kLanes);
  for (int64_t r = 0; r < tile.count * group; ++r) {
    const int64_t node = a.offsets[tile.row] + tile.first + r / group, head = tile.kv_head * group + r % group;
    float max = state.max[r], sum = state.sum[r], shrink = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = static_cast<float>(sink_of(a, head));
      const float next = sink > max ? sink : max;
      if (next != kNegativeInfinity) {
        shrink = exponential(all(max - next))[0];
        sum = sum * shrink + exponential(all(sink - next))[0];
        max = next;
      }
    }
    if (a.lse != nullptr) static_cast<float*>(a.lse)[node * a.heads + head] = sum == 0.0f ? kNegativeInfinity : max + __builtin_logf(sum);
    const Floats factor = all(sum == 0.0f ? 0.0f : shrink / sum);
    const float* from = state.acc + r * width;
    const int64_t at = node * a.out_node + head * a.out_head;
    switch (a.type) {
      case Scalar::BFloat16:
        write_row(from, factor, a.head_dim, static_cast<BFloat16*>(a.out) + at);
        break;
      case Scalar::Half:
        write_row(from, factor, a.head_dim, static_cast<Half*>(a.out) + at);
        break;
      default:
        write_row(from, factor, a.head_dim, static_cast<float*>(a.out) + at);
    }
  }
}

// The functions of RowKernels for one instruction set. rows.h documents them; simd_math.h has the vectors.
#include "distribution/rows.h"

#include <cmath>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "distribution/simd_math.h"
#include "distribution/row_masses.h"
#include "distribution/row_mass_bounds.h"
#include "distribution/row_peak.h"

namespace specdec {
namespace SPECDEC_ISA {

template <class In>
float largest(const void* row, int64_t count) {
  return largest_of(static_cast<const In*>(row), count);
}

// Upper bound of a block's mass: the largest of every few elements replaces all of them.
template <class In>
float mass_bound(const void* piece, int count, const DistributionRow<float>& dist) {
  const In* p = static_cast<const In*>(piece);
  F top[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  int i = 0, group = 0;
  for (; i + 4 * N <= count; i += 4 * N, ++group)
    for (int k = 0; k < 4; ++k) {
      fetch_ahead(p + i + k * N);
      top[k] = larger(widen_lanes(p + i + k * N), top[k]);
    }
  for (; i < count; i += N, ++group) top[0] = larger(load(p + i, count - i), top[0]);
  // The shift covers the rounding of scale and shift, which grows with the normaliser.
  const float scale = dist.inv_t * 1.44269504f, shift = (std::fabs(dist.lse) * 0x1p-21f - dist.lse) * 1.44269504f;
  F sum = {};
  for (int k = 0; k < 4; ++k) {
    const F z = fma(top[k], all(scale), all(shift)), x = z < 100.0f ? z : all(100.0f);
    sum = add_exp2(top[k] >= dist.cut ? x : all(-kInfinity), sum);
  }
  return static_cast<float>(reduce_sum(sum) * group);
}

// The total of max(share * p - q, 0) over a block, up to rounding; an upper bound if a cut is among ties.
template <class In>
float residual_mass(const void* p_piece, const void* q_piece, int count, const DistributionRow<float>& p_dist,
                    const DistributionRow<float>& q_dist, float share) {
  const In *p = static_cast<const In*>(p_piece), *q = static_cast<const In*>(q_piece);
  // Log weights are rounded as in `weights`.
  auto log2_weight = [](F logit, const DistributionRow<float>& dist) __attribute__((always_inline)) {
    return (logit * dist.inv_t - dist.lse) * static_cast<float>(kLog2E);
  };
  F sum[2] = {F{}, F{}};
  auto step = [&](F a, F b, int k) __attribute__((always_inline)) {
    const F x = a >= p_dist.cut ? log2_weight(a, p_dist) : all(-kInfinity);
    const F y = b > q_dist.cut ? log2_weight(b, q_dist) : all(-kInfinity);
    const F rest = fma(add_exp2(x, F{}), all(share), -add_exp2(y, F{}));
    sum[k] += rest > 0.0f ? rest : F{};
  };
  int i = 0;
  for (; i + 2 * N <= count; i += 2 * N)
    for (int k = 0; k < 2; ++k) {
      fetch_ahead(p + i + k * N);
      fetch_ahead(q + i + k * N);
      step(widen_lanes(p + i + k * N), widen_lanes(q + i + k * N), k);
    }
  for (; i < count; i += N) step(load(p + i, count - i), load(q + i, count - i), 0);
  return static_cast<float>(reduce_sum(sum[0] + sum[1]));
}

template <class In>
double mass64(const void* row, int64_t count, float inv_t, double top, float floor) {
  const In* p = static_cast<const In*>(row);
  D sum[2] = {D{}, D{}};
  const D shift = all(top);
  for (int64_t i = 0; i < count; i += N) {
    const F logit = load(p + i, count - i);
    const F z = logit > floor ? logit * inv_t : all(-kInfinity);
    HalfF part[2];
    std::memcpy(part, &z, sizeof z);
    for (int k = 0; k < 2; ++k) sum[k] += exp(__builtin_convertvector(part[k], D) - shift);
  }
  sum[0] += sum[1];
  double total = 0;
  for (int i = 0; i < N / 2; ++i) total += sum[0][i];
  return total;
}

template <class In, bool kMasses>
SPECDEC_INLINE void above_edges(const In* p, int64_t count, float scale, float shift, const float* edges,
                                double* masses, int64_t* counts) {
  F sum[kEdges], edge[kEdges];
  I number[kEdges];
  for (int k = 0; k < kEdges; ++k) sum[k] = F{}, number[k] = I{}, edge[k] = all(edges[k]);
  for (int64_t i = 0; i < count; i += N) {
    const F logit = load(p + i, count - i);
    F mass = {};
    if constexpr (kMasses) mass = add_exp2(fma(logit, all(scale), all(shift)), F{});
    for (int k = 0; k < kEdges; ++k) {
      const I over = logit > edge[k];
      number[k] -= over;
      if constexpr (kMasses) sum[k] += over ? mass : F{};
    }
  }
  for (int k = 0; k < kEdges; ++k) {
    counts[k] = 0;
    for (int lane = 0; lane < N; ++lane) counts[k] += number[k][lane];
    if constexpr (kMasses) masses[k] = reduce_sum(sum[k]);
  }
}

template <class In>
void above(const void* row, int64_t count, float inv_t, float top, const float* edges, double* masses,
           int64_t* counts) {
  const In* p = static_cast<const In*>(row);
  const float scale = inv_t * static_cast<float>(kLog2E);
  if (masses != nullptr)
    above_edges<In, true>(p, count, scale, -top * scale, edges, masses, counts);
  else
    above_edges<In, false>(p, count, 0, 0, edges, masses, counts);
}

template <class In>
int64_t collect(const void* row, int64_t count, float low, float high, int64_t limit, Entry<float>* out) {
  const In* p = static_cast<const In*>(row);
  constexpr int kFew = 4 * N;  // most groups of this size have no element in range
  int64_t found = 0;
  for (int64_t i = 0; i < count && found <= limit;) {
    if (i % kFew == 0 && i + kFew <= count) {
      I some = {};
      for (int k = 0; k < 4; ++k) some |= widen_lanes(p + i + k * N) >= low;
      if (!any(some)) {
        i += kFew;
        continue;
      }
    }
    const F x = load(p + i, count - i);
    const I take = (x >= low) & (x <= high);
    if (any(take)) {
      const int lanes = count - i < N ? static_cast<int>(count - i) : N;
      for (int k = 0; k < lanes; ++k)
        if (take[k]) out[found++] = {x[k], static_cast<int32_t>(i + k)};
    }
    i += N;
  }
  return found;
}

SPECDEC_INLINE I kept(F logit, I ids, const DistributionRow<float>& dist) {
  return (logit > dist.cut) | ((logit == dist.cut) & (ids <= dist.tie_id));
}

template <class In>
void weights(const void* piece, int count, int32_t first, const DistributionRow<float>& dist, float* out) {
  const In* p = static_cast<const In*>(piece);
  I ids = iota() + first;
  for (int i = 0; i < count; i += N, ids += N) {
    const F logit = load(p + i, count - i);
    F weight = exp(logit * dist.inv_t - dist.lse);
    weight = kept(logit, ids, dist) ? weight : F{};
    store(out + i, weight);  // lanes past the end are -inf: weight 0
  }
  const int end = (count + N - 1) / N * N, padded = (count + kPad - 1) / kPad * kPad;
  for (int i = end; i < padded; ++i) out[i] = 0;
}

void subtract(float* p, const float* q, int count) {
  for (int i = 0; i < count; i += N) {
    const F rest = widen_lanes(p + i) - widen_lanes(q + i);
    store(p + i, rest > 0.0f ? rest : F{});
  }
}

double total(const float* weights, int count) {
  F sum[4] = {F{}, F{}, F{}, F{}};
  int i = 0;
  for (; i + 4 * N <= count; i += 4 * N)
    for (int k = 0; k < 4; ++k) sum[k] += widen_lanes(weights + i + k * N);
  for (; i < count; i += N) sum[0] += widen_lanes(weights + i);
  return (reduce_sum(sum[0]) + reduce_sum(sum[1])) + (reduce_sum(sum[2]) + reduce_sum(sum[3]));
}

struct BestLanes {
  F score;
  I ids;
  // Not a constructor: an implicit one would not use the instruction set of the pragma.
  SPECDEC_INLINE BestLanes none() { return {all(-kInfinity), I{}}; }
  SPECDEC_INLINE_MEMBER void add(F contender, I id) {
    const I better = contender > score;
    score = better ? contender : score;
    ids = better ? id : ids;
  }
  SPECDEC_INLINE_MEMBER void into(Best<float>* best) const {
    for (int i = 0; i < N; ++i)
      if (score[i] > best->score || (score[i] == best->score && score[i] > -kInfinity && ids[i] < best->id))
        *best = {score[i], ids[i]};
  }
};

// Upper bound of logit * inv_t + gumbel_of(word), up to rounding: -log1p(-x) >= x, and the bits of a float, as a number,
// are below its log2.
SPECDEC_INLINE F most_of(F logit, float inv_t, U word) {
  constexpr float kBit = static_cast<float>(kLn2 * 0x1p-23);      // one unit of a float's bits, in nats
  constexpr float kUnit = static_cast<float>((127 + 31) * kLn2);  // log of 2^31 in the same scale
  const F log2 = __builtin_convertvector(bits<I>(__builtin_convertvector(bits<I>(word >> 1), F)), F);
  return fma(log2, all(-kBit), logit * inv_t) + kUnit;
}

// The largest logit of each lane in a piece of kWords tokens, of which `count` exist.
template <class In>
SPECDEC_INLINE F top_of(const In* p, int count) {
  F top = load(p, count);
  if (count >= kWords) {
    for (int k = 1; k < kBatch; ++k) top = larger(widen_lanes(p + k * N), top);
  } else {
    for (int k = N; k < count; k += N) top = larger(load(p + k, count - k), top);
  }
  return top;
}

// The best of a piece of tokens, of which `count` exist, given their words, if it reaches `least`.
template <class In>
__attribute__((noinline)) void replay_piece(const In* p, int count, int32_t first, const DistributionRow<float>& dist,
                                            const U* word, float least, Best<float>* best) {
  BestLanes winner = BestLanes::none();
  for (int k = 0; k < kBatch && k * N < count; ++k) {
    const F logit = load(p + k * N, count - k * N);
    if (!any(most_of(logit, dist.inv_t, word[k]) >= least)) continue;
    const I id = iota() + (first + k * N);
    const F score = logit * dist.inv_t + gumbel_of(word[k]);
    winner.add(kept(logit, id, dist) & (id < first + count) ? score : all(-kInfinity), id);
  }
  if (any(winner.score > best->score)) winner.into(best);
}

// Generates noise for two pieces at a time, which hide each other's latency, and only for pieces in which a token may win:
// the largest logit of each lane with its smallest word bounds every score.
template <class In>
void replay(const void* piece, int count, int32_t first, const DistributionRow<float>& dist, const Counter& counter,
            Best<float>* best) {
  constexpr float kMost = 22.9f;  // no Gumbel variate is larger
  const In* p = static_cast<const In*>(piece);
  Philox state;
  prepare(counter, &state);
  const float lowest = dist.cut > -FLT_MAX ? dist.cut : -FLT_MAX;
  float least = -FLT_MAX, floor = lowest;  // lower bounds of winning scores and logits
  auto look = [&]() __attribute__((always_inline)) {
    if (!(best->score > -kInfinity)) return;
    least = best->score - (1e-3f + 1e-5f * std::fabs(best->score));  // covers rounding
    floor = (least - kMost) / dist.inv_t;
    floor = floor > lowest ? floor : lowest;
  };
  look();
  int waits = count;  // first token of a piece that waits for another one; count: none
  F top = all(-kInfinity);
  for (int i = 0; i < count || waits < count; i += kWords) {
    if (i < count) {
      const F here = top_of(p + i, count - i);
      if (!any(here >= floor)) continue;
      top = larger(here, top);
      if (waits == count) {
        waits = i;
        continue;
      }
    }
    U word[2 * kBatch];
    philox<2>(state, {static_cast<uint32_t>(first + waits), static_cast<uint32_t>(first + i)}, word);
    U least_word = word[0];
    for (int k = 1; k < 2 * kBatch; ++k) least_word = smaller(word[k], least_word);
    if (any(most_of(top, dist.inv_t, least_word) >= least)) {
      replay_piece(p + waits, count - waits, first + waits, dist, word, least, best);
      if (i < count) replay_piece(p + i, count - i, first + i, dist, word + kBatch, least, best);
      look();
    }
    waits = count;
    top = all(-kInfinity);
  }
}

void gumbel_max(const float* weights, int count, int32_t first, const Counter& counter, Best<float>* best) {
  const int32_t last = first + count - 1;
  Philox state;
  prepare(counter, &state);
  for (int i = 0; i < count; i += kWords) {
    F weight[kBatch];
    for (int k = 0; k < kBatch; ++k) weight[k] = i + k * N < count ? widen_lanes(weights + i + k * N) : F{};
    const float top = reduce_max(larger(larger(weight[0], weight[1]), larger(weight[2], weight[3])));
    if (top < FLT_MIN) continue;
    // A token can win only if gumbel > need, that is word < exp(-need) 2^32 = exp(log(top) - best) 2^32.
    float below = 0x1p33f;
    if (best->score > -kInfinity) {
      const float need = best->score - noise::log(top);
      if (need > 22.9f) continue;  // more than any Gumbel variate
      below = need < 0 ? 0x1p33f : 1.01f * exp(all(-need))[0] * 0x1p32f;
    }
    U word[kBatch];
    philox<1>(state, {static_cast<uint32_t>(first + i)}, word);
    if (below < 0x1.fp31f) {
      const U bound = all(static_cast<uint32_t>(below) + 1);
      if (!any(((word[0] < bound) | (word[1] < bound)) | ((word[2] < bound) | (word[3] < bound)))) continue;
    }
    BestLanes winner = BestLanes::none();
    for (int k = 0; k < kBatch && i + k * N < count; ++k) {
      const I id = iota() + (first + i + k * N);
      const F score = noise_log(weight[k]) + gumbel_of(word[k]);
      winner.add((weight[k] >= FLT_MIN) & (id <= last) ? score : all(-kInfinity), id);
    }
    if (any(winner.score > best->score)) winner.into(best);
  }
}

template <class In>
SPECDEC_INLINE F scaled_logit(const In* p, int64_t i, int64_t count, F scale, const float* noise) {
  F logit = load(p + i, count - i) * scale;
  logit = logit == logit ? logit : all(-kInfinity);
  return noise == nullptr ? logit : logit + load(noise + i, count - i);
}

template <class In>
void scaled_logits(const void* row, int64_t count, float inv_t, const float* noise, float* out, float* tops) {
  constexpr int kVectors = kTops / N;
  const In* p = static_cast<const In*>(row);
  const F scale = all(inv_t);
  F best[kVectors];
  for (int k = 0; k < kVectors; ++k) best[k] = all(-kInfinity);
  int64_t i = 0;
  for (; i + kTops <= count; i += kTops)
    for (int k = 0; k < kVectors; ++k) {
      const F logit = scaled_logit(p, i + k * N, i + (k + 1) * N, scale, noise);
      store(out + i + k * N, logit);
      best[k] = larger(logit, best[k]);
    }
  for (; i < count; i += N) {
    const F logit = scaled_logit(p, i, count, scale, noise);
    std::memcpy(out + i, &logit, sizeof(float) * (count - i < N ? count - i : N));
    best[0] = larger(logit, best[0]);
  }
  if (tops != nullptr) std::memcpy(tops, best, sizeof best);
}

void gumbel_row(const Counter& counter, int64_t count, float* out) {
  Philox state;
  prepare(counter, &state);
  for (int64_t i = 0; i < count; i += kWords) {
    U word[kBatch];
    philox<1>(state, {static_cast<uint32_t>(i)}, word);
    F noise[kBatch];
    for (int k = 0; k < kBatch; ++k) noise[k] = gumbel_of(word[k]);
    const int64_t size = count - i < kWords ? count - i : kWords;
    std::memcpy(out + i, noise, sizeof(float) * size);
  }
}

}  // namespace SPECDEC_ISA

extern const RowKernels SPECDEC_TABLE;
#define SPECDEC_EACH(function) \
  { SPECDEC_ISA::function<float>, SPECDEC_ISA::function<BFloat16>, SPECDEC_ISA::function<Half> }
const RowKernels SPECDEC_TABLE = {
    SPECDEC_NAME,
    SPECDEC_EACH(masses),
    SPECDEC_EACH(rough_total),
    SPECDEC_EACH(rough_masses),
    SPECDEC_EACH(peak),
    SPECDEC_EACH(largest),
    SPECDEC_EACH(mass_bound),
    SPECDEC_EACH(residual_mass),
    SPECDEC_EACH(mass64),
    SPECDEC_EACH(above),
    SPECDEC_EACH(collect),
    SPECDEC_EACH(weights),
    SPECDEC_EACH(replay),
    SPECDEC_ISA::subtract,
    SPECDEC_ISA::total,
    SPECDEC_ISA::gumbel_max,
    SPECDEC_EACH(scaled_logits),
    SPECDEC_ISA::gumbel_row,
};

}  // namespace specdec

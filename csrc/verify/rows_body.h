// Bodies of RowKernels for one instruction set; see rows.h for what each does and lanes.h for the vectors.
#include "verify/rows.h"

#include <cmath>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "verify/lanes.h"

namespace specdec {
namespace SPECDEC_ISA {

constexpr int kSlice = 2048;           // elements between two looks at the maximum
constexpr double kLog2E = 1.4426950408889634;

template <class In>
SPECDEC_INLINE float largest_of(const In* p, int64_t count) {
  F best[4] = {all(-kInfinity), all(-kInfinity), all(-kInfinity), all(-kInfinity)};
  int64_t i = 0;
  for (; i + 4 * N <= count; i += 4 * N)
    for (int k = 0; k < 4; ++k) best[k] = larger(widen_lanes(p + i + k * N), best[k]);
  for (; i < count; i += N) best[0] = larger(load(p + i, count - i), best[0]);
  return reduce_max(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

template <class In>
float largest(const void* row, int64_t count) {
  return largest_of(static_cast<const In*>(row), count);
}

template <class In>
Peak<float> peak(const void* row, int64_t count) {
  const In* p = static_cast<const In*>(row);
  F best = all(-kInfinity);
  I where = iota(), ids = iota(), nan = {};
  for (int64_t i = 0; i < count; i += N, ids += N) {
    const F x = load(p + i, count - i);
    nan |= x != x;
    const I better = x > best;
    best = better ? x : best;
    where = better ? ids : where;
  }
  Peak<float> out{-kInfinity, 0, any(nan)};
  for (int i = 0; i < N; ++i)
    if (best[i] > out.level || (best[i] == out.level && best[i] > -kInfinity && where[i] < out.id))
      out.level = best[i], out.id = where[i];
  return out;
}

// One slice of sum 2^(l * scale - reference * scale); *top is raised to the slice's largest element.
template <class In>
SPECDEC_INLINE F slice_sum(const In* p, int64_t count, float scale, float shift, F* top) {
  F sum[2] = {F{}, F{}};
  F high[2] = {*top, *top};
  const F a = all(scale), b = all(shift);
  auto step = [&](F l, int k) __attribute__((always_inline)) {
    high[k] = larger(l, high[k]);
    F x = fma(l, a, b), power;
    x = x < -126.0f ? all(-126.0f) : x;
    const F factor = exp2_factor(x, &power);
    sum[k] = fma(factor, power, sum[k]);
  };
  int64_t i = 0;
  for (; i + 2 * N <= count; i += 2 * N) {
    step(widen_lanes(p + i), 0);
    step(widen_lanes(p + i + N), 1);
  }
  for (; i < count; i += N) step(load(p + i, count - i), 0);
  *top = larger(high[0], high[1]);
  return sum[0] + sum[1];
}

template <class In>
Mass<float> mass(const void* row, int64_t count, float inv_t) {
  const In* p = static_cast<const In*>(row);
  const double exact = inv_t * kLog2E;
  const float scale = static_cast<float>(exact);
  // The reference level only has to be near the largest element; it moves when a slice exceeds it clearly.
  float reference = largest_of(p, count < kSlice ? count : kSlice), top = reference;
  reference = reference > -1e30f ? reference : -1e30f;
  double sum = 0;
  for (int64_t i = 0; i < count;) {
    const int64_t size = count - i < kSlice ? count - i : kSlice;
    const float shift = -reference * scale;
    F high = all(-kInfinity);
    const double part = reduce_sum(slice_sum(p + i, size, scale, shift, &high));
    const float slice_top = reduce_max(high);
    top = slice_top > top ? slice_top : top;
    if ((slice_top - reference) * scale > 2.0f && slice_top < kInfinity) {
      const float moved = slice_top;
      sum *= std::exp2((static_cast<double>(reference) - moved) * exact);
      reference = moved;
      continue;  // this slice again, from the new reference
    }
    sum += part;
    i += size;
  }
  if (!(std::fabs(top) * scale < 1e30f) && top > -kInfinity && top < kInfinity) {
    // Levels near the end of float's range: no speed here, but the right answer.
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += std::exp((double(widen(p[i])) - top) * inv_t);
    return {top, top * exact + std::log2(total)};
  }
  // `scale` and `shift` are rounded; the shift enters exactly as it was used, the scale to first order.
  const double used = -static_cast<double>(-reference * scale);
  return {top, used + (exact - scale) * reference + std::log2(sum)};
}

template <class In>
double mass64(const void* row, int64_t count, float inv_t, double top) {
  const In* p = static_cast<const In*>(row);
  D sum[2] = {D{}, D{}};
  const D shift = all(top);
  for (int64_t i = 0; i < count; i += N) {
    const F z = load(p + i, count - i) * inv_t;
    HalfF part[2];
    std::memcpy(part, &z, sizeof z);
    for (int k = 0; k < 2; ++k) sum[k] += exp(__builtin_convertvector(part[k], D) - shift);
  }
  sum[0] += sum[1];
  double total = 0;
  for (int i = 0; i < N / 2; ++i) total += sum[0][i];
  return total;
}

template <class In>
int64_t collect(const void* row, int64_t count, float threshold, Entry<float>* out) {
  const In* p = static_cast<const In*>(row);
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += N) {
    const F x = load(p + i, count - i);
    const I take = x >= threshold;
    if (!any(take)) continue;
    const int lanes = count - i < N ? static_cast<int>(count - i) : N;
    for (int k = 0; k < lanes; ++k)
      if (take[k]) out[found++] = {x[k], static_cast<int32_t>(i + k)};
  }
  return found;
}

SPECDEC_INLINE I kept(F level, I ids, const LawRow<float>& law) {
  return (level > law.cut) | ((level == law.cut) & (ids <= law.tie_id));
}

template <class In>
void weights(const void* piece, int count, int32_t first, const LawRow<float>& law, float* out) {
  const In* p = static_cast<const In*>(piece);
  I ids = iota() + first;
  for (int i = 0; i < count; i += N, ids += N) {
    const F level = load(p + i, count - i);
    F weight = exp(level * law.inv_t - law.lse);
    weight = kept(level, ids, law) ? weight : F{};
    if (count - i < N)  // the padding looks like -inf, which a law without finite cut "keeps" with weight 0
      for (int k = count - i; k < N; ++k) weight[k] = 0;
    store(out + i, weight);
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
  F score = all(-kInfinity);
  I ids = {};
  __attribute__((always_inline)) void add(F candidate, I id) {
    const I better = candidate > score;
    score = better ? candidate : score;
    ids = better ? id : ids;
  }
  __attribute__((always_inline)) void into(Best<float>* best) const {
    for (int i = 0; i < N; ++i)
      if (score[i] > best->score || (score[i] == best->score && score[i] > -kInfinity && ids[i] < best->id))
        *best = {score[i], ids[i]};
  }
};

template <class In>
void replay(const void* piece, int count, int32_t first, const LawRow<float>& law, const Counter& counter, float top,
            Best<float>* best) {
  const In* p = static_cast<const In*>(piece);
  // A token wins only with gumbel > best - top, that is with a word below a bound. Slack for the roundings of noise.
  U bound = all(~0u);
  bool every = true;
  if (best->score > -kInfinity) {
    const double need = double(best->score) - double(top) * law.inv_t;
    const double slack = 1e-3 + 1e-5 * std::fabs(double(best->score));
    const double below = -std::expm1(-std::exp(-(need - slack))) * 0x1p32;
    every = !(below < 0x1p32 - 2);
    if (!every) bound = all(static_cast<uint32_t>(below) + 1);
  }
  BestLanes winner;
  I ids = iota() + first;
  for (int i = 0; i < count; i += 2 * N, ids += 2 * N) {
    U word[2];
    philox(counter, static_cast<uint32_t>(first + i), &word[0], &word[1]);
    if (!every && !any((word[0] < bound) | (word[1] < bound))) continue;
    for (int k = 0; k < 2 && i + k * N < count; ++k) {
      const F level = load(p + i + k * N, count - i - k * N);
      const I id = ids + k * N;
      const F score = level * law.inv_t + gumbel_of(word[k]);
      winner.add(kept(level, id, law) & (id < first + count) ? score : all(-kInfinity), id);
    }
  }
  winner.into(best);
}

void race(const float* weights, int count, int32_t first, const Counter& counter, Best<float>* best) {
  BestLanes winner;
  I ids = iota() + first;
  for (int i = 0; i < count; i += 2 * N, ids += 2 * N) {
    F weight[2];
    std::memcpy(weight, weights + i, sizeof weight);
    if (!any((weight[0] >= FLT_MIN) | (weight[1] >= FLT_MIN))) continue;
    U word[2];
    philox(counter, static_cast<uint32_t>(first + i), &word[0], &word[1]);
    for (int k = 0; k < 2; ++k) {
      const F score = noise_log(weight[k]) + gumbel_of(word[k]);
      winner.add(weight[k] >= FLT_MIN ? score : all(-kInfinity), ids + k * N);
    }
  }
  winner.into(best);
}

void gumbel_row(const Counter& counter, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 2 * N) {
    U word[2];
    philox(counter, static_cast<uint32_t>(i), &word[0], &word[1]);
    const F both[2] = {gumbel_of(word[0]), gumbel_of(word[1])};
    const int64_t size = count - i < 2 * N ? count - i : 2 * N;
    std::memcpy(out + i, both, sizeof(float) * size);
  }
}

}  // namespace SPECDEC_ISA

extern const RowKernels SPECDEC_TABLE;
#define SPECDEC_EACH(function) \
  { SPECDEC_ISA::function<float>, SPECDEC_ISA::function<BFloat16>, SPECDEC_ISA::function<Half> }
const RowKernels SPECDEC_TABLE = {
    SPECDEC_NAME,
    SPECDEC_EACH(mass),
    SPECDEC_EACH(peak),
    SPECDEC_EACH(largest),
    SPECDEC_EACH(mass64),
    SPECDEC_EACH(collect),
    SPECDEC_EACH(weights),
    SPECDEC_EACH(replay),
    SPECDEC_ISA::subtract,
    SPECDEC_ISA::total,
    SPECDEC_ISA::race,
    SPECDEC_ISA::gumbel_row,
};

}  // namespace specdec

// The largest element of a row [V]. Only rows_body.h includes it.
namespace specdec {
namespace SPECDEC_ISA {

// The first largest element, if the row has no NaN.
template <class In>
Peak<float> peak(const void* row, int64_t count) {
  const In* p = static_cast<const In*>(row);
  constexpr int kChains = 4;  // hides the latency of comparisons
  F best[kChains];
  I where[kChains], ids = iota(), nan = {};
  for (int k = 0; k < kChains; ++k) best[k] = all(-kInfinity), where[k] = ids;
  auto look = [&](F x, int k) __attribute__((always_inline)) {
    nan |= x != x;
    const I better = x > best[k];
    best[k] = better ? x : best[k];
    where[k] = better ? ids : where[k];
    ids += N;
  };
  int64_t i = 0;
  for (; i + kChains * N <= count; i += kChains * N) {
    for (const In* line = p + i; line < p + i + kChains * N; line += 64 / sizeof(In)) fetch_ahead(line);
    for (int k = 0; k < kChains; ++k) look(widen_lanes(p + i + k * N), k);
  }
  for (; i < count; i += N) look(load(p + i, count - i), 0);
  Peak<float> out{-kInfinity, 0, any(nan)};
  for (int k = 0; k < kChains; ++k)
    for (int lane = 0; lane < N; ++lane) {
      const float logit = best[k][lane];
      if (logit > out.logit || (logit == out.logit && logit > -kInfinity && where[k][lane] < out.id))
        out.logit = logit, out.id = where[k][lane];
    }
  return out;
}

}  // namespace SPECDEC_ISA
}  // namespace specdec

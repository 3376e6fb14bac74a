// rejection_verify over logits beside one read of them (read_once.c), both called from C++: what the kernel itself
// costs, with no call from Python on either side. Usage: verify_beside_read VOCAB NODES THREADS APART SETS ROUNDS
// RULE TYPE. Prints a line per round, microseconds of the read and of the verification, and then the mean number of
// accepted tokens.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "parallel.h"
#include "verify/rejection.h"
#include "distribution/distribution_stats.h"
#include "sampling/sample.h"

extern "C" uint64_t read_once(const char* data, size_t bytes, int threads);

namespace specdec {
namespace {

int threads = 1;

// Pieces as torch's pool makes them.
int64_t divided(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

}  // namespace

void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  const int64_t pieces = std::min<int64_t>(threads, divided(end - begin, std::max<int64_t>(grain, 1)));
  const int64_t size = divided(end - begin, pieces);
#pragma omp parallel for num_threads(static_cast<int>(pieces)) schedule(static, 1) if (pieces > 1)
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = begin + i * size;
    if (first < end) function(first, std::min(end, first + size), context);
  }
}

int thread_count() { return threads; }

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kDrafts = 64;

double microseconds(Clock::time_point from) { return std::chrono::duration<double, std::micro>(Clock::now() - from).count(); }

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

// Rows of logits with their statistics, all at temperature 1.
struct Rows {
  int64_t rows, vocab, bytes;
  std::unique_ptr<void, Freed> logits;
  std::vector<float> inv_t, lse, cut, mass, one, zero;
  std::vector<int32_t> tie_id, none;

  Rows(Scalar type, int64_t rows_, int64_t vocab_, const std::vector<float>& values)
      : rows(rows_), vocab(vocab_), bytes((rows * vocab * (type == Scalar::Float32 ? 4 : 2) + 63) / 64 * 64),
        logits(std::aligned_alloc(64, static_cast<size_t>(bytes))), inv_t(rows), lse(rows), cut(rows), mass(rows * block_count(vocab)),
        one(rows, 1.0F), zero(rows, 0.0F), tie_id(rows), none(rows, 0) {
    std::memset(logits.get(), 0, static_cast<size_t>(bytes));
    for (int64_t i = 0; i < rows * vocab; ++i) {
      if (type == Scalar::Float32) static_cast<float*>(logits.get())[i] = values[i];
      else static_cast<BFloat16*>(logits.get())[i] = narrow<BFloat16>(values[i]);
    }
  }
  LazyStats lazy(Scalar type) {
    return {{logits.get(), rows, vocab, vocab, type}, {one.data(), none.data(), one.data(), zero.data()}, inv_t.data(), lse.data(), cut.data(), tie_id.data(), mass.data()};
  }
  TokenDistributions dists(Scalar type, const LazyStats* pending = nullptr) {
    return {{logits.get(), rows, vocab, vocab, type}, inv_t.data(), lse.data(), cut.data(), tie_id.data(), mass.data(), pending};
  }
};

// A chain of nodes - 1 sampled tokens, drafted kDrafts times.
struct Step {
  Rows target, draft;
  std::vector<std::vector<int64_t>> tokens;

  Step(Scalar type, int64_t nodes, int64_t vocab, const std::vector<float>& levels, const std::vector<float>& drafted, int64_t seed)
      : target(type, nodes, vocab, levels), draft(type, nodes, vocab, drafted) {
    const LazyStats all = draft.lazy(type);
    distribution_stats(all.logits, all.sampling, all.inv_t, all.lse, all.cut, all.tie_id, all.mass);
    std::vector<int32_t> order(nodes);
    std::vector<int64_t> seeds(nodes);
    for (int at = 0; at < kDrafts; ++at) {
      for (int64_t i = 0; i < nodes; ++i) order[i] = static_cast<int32_t>(i), seeds[i] = i + 1000 * at + seed;
      tokens.emplace_back(nodes);
      draft_sample(draft.dists(type), seeds.data(), order.data(), order.data(), tokens.back().data());
      std::rotate(tokens.back().begin(), tokens.back().end() - 1, tokens.back().end());
    }
  }
};

int run(char** values) {
  const int64_t vocab = std::atoll(values[1]), nodes = std::atoll(values[2]), sets = std::atoll(values[5]), rounds = std::atoll(values[6]);
  threads = std::atoi(values[3]);
  const double apart = std::atof(values[4]);
  const ChainRule rule = std::strcmp(values[7], "block") == 0 ? ChainRule::kBlock : ChainRule::kRejection;
  const Scalar type = std::strcmp(values[8], "bfloat16") == 0 ? Scalar::BFloat16 : Scalar::Float32;
  std::mt19937_64 random(0);
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<Step>> steps;
  for (int64_t s = 0; s < sets; ++s) {
    std::vector<float> levels(nodes * vocab), drafted(nodes * vocab);
    for (float& level : levels) level = 2 * normal(random);
    for (size_t i = 0; i < levels.size(); ++i) drafted[i] = levels[i] + static_cast<float>(apart) * (apart > 0 ? normal(random) : 0);
    steps.push_back(std::make_unique<Step>(type, nodes, vocab, levels, drafted, s));
  }
  const std::vector<int32_t> offsets{0, static_cast<int32_t>(nodes)}, roots{0};
  std::vector<int8_t> proposal_kinds(nodes, 1);
  std::vector<int32_t> dist_index(nodes), path(nodes), accepted(1);
  for (int64_t i = 1; i < nodes; ++i) dist_index[i] = static_cast<int32_t>(i - 1);
  std::vector<int64_t> next(1);
  uint64_t sum = 0;
  double kept = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    Step& first = *steps[(2 * round) % sets];
    auto begin = Clock::now();
    sum += read_once(static_cast<const char*>(first.target.logits.get()), static_cast<size_t>(first.target.bytes), threads);
    const double read = microseconds(begin);

    Step& step = *steps[(2 * round + 1) % sets];
    const std::vector<int64_t> seeds{100 * (round % kDrafts)};
    begin = Clock::now();
    const LazyStats lazy = step.target.lazy(type);
    mark_uncomputed(lazy, 0, nodes);
    const TokenDistributions target = step.target.dists(type, &lazy), draft = step.draft.dists(type);
    const ChainDraft chain{step.tokens[round % kDrafts].data(), offsets.data(), proposal_kinds.data(), dist_index.data(), nodes, 1, &draft, nullptr};
    rejection_verify(chain, target, rule, {seeds.data(), roots.data(), nullptr, nullptr, nullptr}, {path.data(), accepted.data(), next.data(), nodes - 1});
    const double verified = microseconds(begin);
    std::printf("%.3f %.3f\n", read, verified);
    kept += accepted[0];
    sum += static_cast<uint64_t>(next[0]);
  }
  std::printf("%.3f %llu\n", kept / static_cast<double>(rounds), static_cast<unsigned long long>(sum));
  return 0;
}

}  // namespace
}  // namespace specdec

int main(int count, char** values) { return count == 9 ? specdec::run(values) : 2; }

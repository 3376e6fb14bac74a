// Runs the plain C++ of every operator over random ragged inputs; built with -fsanitize=address,undefined by
// tests/architecture/test_sanitizers.py. Usage: sanitize [cases per operator] [first seed]; `sanitize broken` reads past
// the end of a block and must fail.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "parallel.h"
#include "sanitize/random_inputs.h"

namespace specdec {

// Always two threads, so pieces split at every possible border.
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  const int64_t middle = std::min(end, begin + std::max<int64_t>(grain, (end - begin) / 2));
  std::thread other([&] { function(begin, middle, context); });
  if (middle < end) function(middle, end, context);
  other.join();
}

int thread_count() { return 2; }

}  // namespace specdec

int main(int count, char** values) {
  using namespace specdec::sanitize;
  if (count > 1 && std::strcmp(values[1], "broken") == 0) {
    return Block(specdec::Scalar::Float32, count + 1).get(count + 1) == 0;
  }
  const uint64_t cases = count > 1 ? std::strtoull(values[1], nullptr, 10) : 40;
  const uint64_t first = count > 2 ? std::strtoull(values[2], nullptr, 10) : 1;
  for (uint64_t seed = first; seed < first + cases; ++seed) {
    attention_case(seed);
    decoder_case(seed);
    process_logits_case(seed);
    expand_case(seed);
    linear_case(seed);
    kv_cache_case(seed);
    ngram_case(seed);
    proposals_case(seed);
    recurrent_case(seed);
    suffix_case(seed);
    verify_case(seed);
  }
  std::printf("%llu cases per operator: fine\n", static_cast<unsigned long long>(cases));
  return 0;
}

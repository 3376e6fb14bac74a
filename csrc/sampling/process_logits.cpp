#include "sampling/process_logits.h"

#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

struct PathToken {
  int64_t token;
  int32_t count;
  bool committed;
};

// The distinct tokens on a node's path, and its depth.
struct Path {
  std::vector<PathToken> tokens;
  uint64_t filter = 0;  // bit token % 64 is set: excludes most committed tokens with one test
  int32_t depth = 0;

  void follow(const TreePaths& paths, int32_t start, int64_t node) {
    tokens.clear();
    filter = 0;
    depth = 0;
    for (; paths.parents[node] >= 0; node = start + paths.parents[node]) {
      ++depth;
      add(paths.tokens[node]);
    }
  }
  void add(int64_t token) {
    filter |= uint64_t{1} << (token & 63);
    for (PathToken& known : tokens) {
      if (known.token == token) {
        ++known.count;
        return;
      }
    }
    tokens.push_back({token, 1, false});
  }
  // Marks a token of the path as committed and returns its count on the path.
  int32_t take(int64_t token) {
    if (!(filter >> (token & 63) & 1)) return 0;
    for (PathToken& known : tokens) {
      if (known.token == token) {
        known.committed = true;
        return known.count;
      }
    }
    return 0;
  }
};

// Addends for four logits by four bits of a mask: -inf for a clear bit, -0.0 for a set bit.
template <class Real>
struct Nibbles {
  alignas(4 * sizeof(Real)) Real of[16][4];
  constexpr Nibbles() : of() {
    for (int bits = 0; bits < 16; ++bits)
      for (int bit = 0; bit < 4; ++bit) of[bits][bit] = bits >> bit & 1 ? Real(-0.0) : -std::numeric_limits<Real>::infinity();
  }
};
template <class Real>
constexpr Nibbles<Real> kAdded{};

template <class T>
class Row {
 public:
  using Real = Accumulator<T>;
  Row(T* data, int64_t vocab) : data_(data), vocab_(vocab) {}

  void penalise(const Penalties& penalties, int64_t request, Path& path) const {
    const float* factors = penalties.factors + 3 * request;
    const Real repetition = factors[0], presence = factors[1], frequency = factors[2];
    if (repetition == 1 && presence == 0 && frequency == 0) return;
    const auto one = [&](int64_t token, int32_t count) {
      if (token < 0 || token >= vocab_) return;
      Real logit = widen(data_[token]);
      logit = logit < 0 ? logit * repetition : logit / repetition;
      logit -= frequency * static_cast<Real>(count);
      if (count > 0) logit -= presence;
      data_[token] = narrow<T>(logit);
    };
    const int64_t first = penalties.rows[request] * penalties.capacity, last = first + penalties.sizes[penalties.rows[request]];
    for (int64_t i = first; i < last; ++i) one(penalties.ids[i], penalties.counts[i] + path.take(penalties.ids[i]));
    for (const PathToken& fresh : path.tokens)
      if (!fresh.committed) one(fresh.token, fresh.count);
  }

  void add(const Additions& additions, int64_t request, int64_t position) const {
    for (int64_t i = additions.offsets[request]; i < additions.offsets[request + 1]; ++i) {
      const int32_t token = additions.ids[i];
      if (token < 0 || token >= vocab_ || position >= additions.until[i]) continue;
      data_[token] = narrow<T>(widen(data_[token]) + static_cast<Real>(additions.values[i]));
    }
  }

  void force(const ForcedTokens& forced, int64_t request, int64_t position) const {
    for (int64_t i = forced.offsets[request]; i < forced.offsets[request + 1]; ++i) {
      if (forced.positions[i] != position) continue;
      const int64_t token = forced.ids[i], known = token >= 0 && token < vocab_ ? token : vocab_;
      for (int64_t v = 0; v < known; ++v) forbid(v);
      for (int64_t v = known + 1; v < vocab_; ++v) forbid(v);
    }
  }

  void mask(const int32_t* words) const {
    for (int64_t first = 0; first < vocab_; first += 32) {
      const uint32_t allowed = static_cast<uint32_t>(words[first / 32]);
      if (allowed == 0xffffffffu) continue;
      if (vocab_ - first >= 32) {
        mask_word(data_ + first, allowed);
      } else {
        for (int64_t bit = 0; first + bit < vocab_; ++bit)
          if (!(allowed >> bit & 1)) forbid(first + bit);
      }
    }
  }

 private:
  // 32 tokens without a branch, since masks may be irregular. Adding -0.0 changes no bits of any number.
  static void mask_word(T* data, uint32_t allowed) {
    for (int nibble = 0; nibble < 8; ++nibble, allowed >>= 4) {
      const Real* added = kAdded<Real>.of[allowed & 15];
      for (int bit = 0; bit < 4; ++bit) data[4 * nibble + bit] = narrow<T>(widen(data[4 * nibble + bit]) + added[bit]);
    }
  }

  // Adding -inf keeps NaN and turns +inf into NaN, so broken rows remain detectable.
  void forbid(int64_t token) const { data_[token] = narrow<T>(widen(data_[token]) - std::numeric_limits<Real>::infinity()); }

  T* data_;
  int64_t vocab_;
};

bool ascending(const int32_t* offsets, int64_t requests, int64_t limit, int64_t* at) {
  int32_t before = 0;
  for (*at = 0; *at <= requests; ++*at) {
    if (offsets[*at] < before || offsets[*at] > limit) return false;
    before = offsets[*at];
  }
  return true;
}

}  // namespace

const char* invalid_processors(const Matrix& logits, const LogitsProcessors& processors, int64_t* at) {
  const TreePaths& paths = processors.paths;
  if (!ascending(paths.offsets, paths.requests, paths.num_nodes, at) || paths.offsets[0] != 0) return "offsets";
  for (int64_t b = 0; b < paths.requests; ++b) {
    for (*at = paths.offsets[b]; *at < paths.offsets[b + 1]; ++*at) {
      const int64_t node = *at - paths.offsets[b];
      if (node == 0 ? paths.parents[*at] != -1 : paths.parents[*at] < 0 || paths.parents[*at] >= node) return "parents";
    }
  }
  if (paths.nodes != nullptr)
    for (*at = 0; *at < logits.rows; ++*at)
      if (paths.nodes[*at] < 0 || paths.nodes[*at] >= paths.num_nodes) return "nodes";
  if (const Penalties& p = processors.penalties; p.factors != nullptr) {
    for (*at = 0; *at < p.table_rows; ++*at)
      if (p.sizes[*at] < 0 || p.sizes[*at] > p.capacity) return "penalties sizes";
    for (*at = 0; *at < paths.requests; ++*at) {
      if (p.rows[*at] < 0 || p.rows[*at] >= p.table_rows) return "penalties rows";
      if (!(p.factors[3 * *at] > 0)) return "penalties repetition";
    }
  }
  if (const Additions& a = processors.additions; a.offsets != nullptr) {
    if (!ascending(a.offsets, paths.requests, a.count, at)) return "additions offsets";
    for (*at = 0; *at < a.count; ++*at)
      if (!(a.values[*at] < std::numeric_limits<float>::infinity())) return "additions values";
  }
  if (processors.forced.offsets != nullptr && !ascending(processors.forced.offsets, paths.requests, processors.forced.count, at)) return "forced offsets";
  if (const TokenMasks& m = processors.masks; m.words != nullptr)
    for (*at = 0; *at < logits.rows; ++*at)
      if (m.index[*at] < -1 || m.index[*at] >= m.count) return "masks index";
  return nullptr;
}

void process_logits(const Matrix& logits, const LogitsProcessors& processors) {
  const TreePaths& paths = processors.paths;
  std::vector<int32_t> request_of(static_cast<size_t>(paths.num_nodes), -1);
  for (int32_t b = 0; b < paths.requests; ++b)
    for (int32_t node = paths.offsets[b]; node < paths.offsets[b + 1]; ++node) request_of[node] = b;
  const bool whole_rows = processors.masks.words != nullptr || processors.forced.offsets != nullptr;
  const int64_t work = whole_rows ? logits.columns : processors.penalties.capacity;
  with_scalar(logits.type, [&](auto element) {
    using T = decltype(element);
    parallel_for(0, logits.rows, row_grain(work), [&](int64_t begin, int64_t end) {
      Path path;
      for (int64_t r = begin; r < end; ++r) {
        const int64_t node = paths.nodes != nullptr ? paths.nodes[r] : r;
        const int32_t request = request_of[node];
        if (request < 0) continue;
        path.follow(paths, paths.offsets[request], node);
        const int64_t position = int64_t{paths.roots[request]} + path.depth + 1;
        const Row<T> row(static_cast<T*>(const_cast<void*>(logits.at(r, 0))), logits.columns);
        if (processors.penalties.factors != nullptr) row.penalise(processors.penalties, request, path);
        if (processors.additions.offsets != nullptr) row.add(processors.additions, request, position);
        if (processors.forced.offsets != nullptr) row.force(processors.forced, request, position);
        if (processors.masks.words != nullptr && processors.masks.index[r] >= 0)
          row.mask(processors.masks.words + processors.masks.index[r] * processors.masks.width);
      }
    });
  });
}

}  // namespace specdec

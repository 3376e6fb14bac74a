#include "attention/tree_attention.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "attention/visibility.h"
#include "parallel.h"

namespace specdec {
namespace {

constexpr int64_t kFewNodes = 64;       // rows with more nodes transpose their keys
constexpr int64_t kTileQueries = 96;    // approximate queries per tile
constexpr int64_t kWideQueries = 192;   // the same for rows with many nodes
constexpr int64_t kChunk = 512;         // keys per partial result, a multiple of kKeyBlock
constexpr double kGrain = 3e5;          // multiply-adds per piece of work that justify another thread (tens of microseconds)

// Scratch memory of a thread, 64-byte aligned, kept between calls.
float* scratch_memory(int64_t floats) {
  static thread_local std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
  static thread_local int64_t size = 0;
  if (floats > size) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((floats * 4 + 4095) / 4096 * 4096))));
    size = floats;
  }
  return memory.get();
}

const TileKernel& tile_kernel(Isa isa) {
#if defined(__x86_64__)
  if (usable(isa) == Isa::Avx512) return kAvx512Tile;
  if (usable(isa) == Isa::Avx2) return kAvx2Tile;
#endif
  (void)isa;
  return kPortableTile;
}

AttentionProblem check(const AttentionArguments& a) {
  if (a.offsets[0] != 0) return {"offsets (first entry)", 0, a.offsets[0], 1};
  for (int64_t b = 0; b < a.rows; ++b) {
    const int64_t count = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b];
    if (count < 0 || a.offsets[b + 1] > a.nodes) return {"offsets (end of the row)", b, a.offsets[b + 1], a.nodes + 1};
    if (count == 0) continue;
    if (a.ancestors != nullptr && count > 32 * a.words) return {"number of nodes (32 per ancestor word)", b, count, 32 * a.words + 1};
    const int64_t slots = a.lengths[b] + count, most = a.pages_per_row * a.page_size;
    if (a.lengths[b] < 0) return {"lengths", b, a.lengths[b], most};
    if (slots > most) return {"number of slots (length + nodes against pages_per_row * page_size)", b, slots, most + 1};
    const int32_t* table = a.page_table + b * a.pages_per_row;
    for (int64_t p = 0; p <= (slots - 1) / a.page_size; ++p) {
      if (table[p] < 0 || table[p] >= a.pages) return {"page in page_table", b, table[p], a.pages};
    }
  }
  return {nullptr, 0, 0, 0};
}

template <class T>
void clear_nodes(const AttentionArguments& a, int64_t first) {
  for (int64_t node = first; node < a.nodes; ++node) {
    for (int64_t head = 0; head < a.heads; ++head) {
      T* to = static_cast<T*>(a.out) + node * a.out_node + head * a.out_head;
      std::fill(to, to + a.head_dim, T{});
      if (a.lse != nullptr) {
        static_cast<Accumulator<T>*>(a.lse)[node * a.heads + head] = -std::numeric_limits<Accumulator<T>>::infinity();
      }
    }
  }
}

// A tile and the number of its partial results.
struct Job {
  Tile tile;
  int64_t chunks;
};

int64_t first_key(const AttentionArguments& a, const Tile& tile) {
  if (a.window <= 0) return 0;
  int64_t oldest = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < tile.count; ++i) oldest = std::min(oldest, query_position(a, tile.row, tile.first + i));
  // The position of a node key may be smaller than its slot's; that of a committed key is not.
  return std::clamp<int64_t>(oldest - a.window + 1, 0, a.lengths[tile.row]);
}

void plan(const AttentionArguments& a, std::vector<Job>& jobs, double& work) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t b = 0; b < a.rows; ++b) {
    const int64_t count = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b];
    const bool wide = count > kFewNodes;
    const int64_t nodes_per_tile = std::clamp<int64_t>((wide ? kWideQueries : kTileQueries) / group, 1, kMostNodes);
    const int64_t tiles = (count + nodes_per_tile - 1) / nodes_per_tile;
    for (int64_t t = 0; t < tiles; ++t) {
      // The work of causal tiles grows with their index. Tiles from both ends alternate, which balances pieces of the list.
      const int64_t first = (t % 2 == 0 ? t / 2 : tiles - 1 - t / 2) * nodes_per_tile;
      Tile tile = {b, 0, first, std::min(nodes_per_tile, count - first), 0, a.lengths[b] + count, wide};
      if (a.ancestors == nullptr) tile.key_end = a.lengths[b] + first + tile.count;
      tile.key_begin = first_key(a, tile);
      const int64_t chunks = (tile.key_end + kChunk - 1) / kChunk - tile.key_begin / kChunk;
      work += static_cast<double>(tile.count * a.heads) * static_cast<double>((tile.key_end - tile.key_begin) * a.head_dim * 2);
      for (tile.kv_head = 0; tile.kv_head < a.kv_heads; ++tile.kv_head) jobs.push_back({tile, chunks});
    }
  }
}

Tile chunk_of(const Job& job, int64_t chunk) {
  Tile tile = job.tile;
  const int64_t begin = (tile.key_begin / kChunk + chunk) * kChunk;
  tile.key_end = std::min(tile.key_end, begin + kChunk);
  tile.key_begin = std::max(tile.key_begin, begin);
  return tile;
}

class Runner {
 public:
  Runner(const AttentionArguments& arguments, const TileKernel& kernel)
      : a_(arguments), kernel_(kernel), group_(a_.heads / a_.kv_heads), width_(padded(a_.head_dim, kernel.lanes)) {}

  // All chunks of a job on one thread.
  void run(const Job& job, const Job* next) const {
    const int64_t rows = job.tile.count * group_, partial = partial_floats(rows, width_), scratch = scratch_floats(rows, width_);
    float* memory = scratch_memory(scratch + 2 * partial);
    const Partial state = partial_at(memory + padded(scratch, 16), rows), other = partial_at(memory + padded(scratch, 16) + partial, rows);
    const Tile* following = next == nullptr ? nullptr : &next->tile;
    kernel_.attend(a_, chunk_of(job, 0), job.chunks == 1 ? following : nullptr, memory, state);
    for (int64_t c = 1; c < job.chunks; ++c) {
      kernel_.attend(a_, chunk_of(job, c), c + 1 == job.chunks ? following : nullptr, memory, other);
      kernel_.merge(rows, width_, state, other);
    }
    kernel_.finish(a_, job.tile, state);
  }

  // Chunks of all jobs on all threads; the sums are the same as those of run().
  void run_split(const std::vector<Job>& jobs, double work) const {
    std::vector<int64_t> first_chunk(jobs.size() + 1, 0), memory_at(jobs.size() + 1, 0);
    int64_t scratch = 0;
    for (size_t j = 0; j < jobs.size(); ++j) {
      const int64_t rows = jobs[j].tile.count * group_;
      first_chunk[j + 1] = first_chunk[j] + jobs[j].chunks;
      memory_at[j + 1] = memory_at[j] + jobs[j].chunks * partial_floats(rows, width_);
      scratch = std::max(scratch, scratch_floats(rows, width_));
    }
    const std::unique_ptr<float[]> partials(new float[static_cast<size_t>(memory_at.back())]);
    const auto partial_of = [&](size_t j, int64_t c) {
      const int64_t rows = jobs[j].tile.count * group_;
      return partial_at(partials.get() + memory_at[j] + c * partial_floats(rows, width_), rows);
    };
    const int64_t chunks = first_chunk.back();
    parallel_for(0, chunks, grain(chunks, work), [&](int64_t begin, int64_t end) {
      float* memory = scratch_memory(scratch);
      for (int64_t n = begin; n < end; ++n) {
        const size_t j = static_cast<size_t>(std::upper_bound(first_chunk.begin(), first_chunk.end(), n) - first_chunk.begin() - 1);
        kernel_.attend(a_, chunk_of(jobs[j], n - first_chunk[j]), nullptr, memory, partial_of(j, n - first_chunk[j]));
      }
    });
    for (size_t j = 0; j < jobs.size(); ++j) {
      const Partial state = partial_of(j, 0);
      for (int64_t c = 1; c < jobs[j].chunks; ++c) kernel_.merge(jobs[j].tile.count * group_, width_, state, partial_of(j, c));
      kernel_.finish(a_, jobs[j].tile, state);
    }
  }

  static int64_t grain(int64_t items, double work) {
    return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(items) * std::min(1.0, kGrain / std::max(work, 1.0))));
  }

 private:
  const AttentionArguments& a_;
  const TileKernel& kernel_;
  int64_t group_, width_;
};

void run_double(const AttentionArguments& a, double work) {
  for (int64_t b = 0; b < a.rows; ++b) {
    const int64_t count = static_cast<int64_t>(a.offsets[b + 1]) - a.offsets[b], queries = count * a.heads;
    parallel_for(0, queries, Runner::grain(queries, 16 * work), [&](int64_t begin, int64_t end) {
      std::vector<double> scores(static_cast<size_t>(a.lengths[b] + count));
      for (int64_t q = begin; q < end; ++q) attend_double(a, b, q / a.heads, q % a.heads, scores.data());
    });
  }
}

}  // namespace

AttentionProblem tree_attention(const AttentionArguments& a, Isa isa) {
  const AttentionProblem problem = check(a);
  if (problem.text != nullptr) return problem;
  static thread_local std::vector<Job> jobs;
  jobs.clear();
  double work = 0.0;
  plan(a, jobs, work);
  if (a.type == Scalar::Float64) {
    run_double(a, work);
  } else {
    const Runner runner(a, tile_kernel(isa));
    const int64_t count = static_cast<int64_t>(jobs.size());
    int64_t chunks = 0;
    bool wide = false;  // wide tiles are many, and their partial results would take much memory
    for (const Job& job : jobs) {
      chunks += job.chunks;
      wide |= job.tile.wide;
    }
    if (!wide && work > kGrain && chunks > count && count < 4 * thread_count()) {
      runner.run_split(jobs, work);
    } else {
      const std::vector<Job>& list = jobs;  // `jobs` is thread-local, so workers need a reference to the caller's list
      parallel_for(0, count, Runner::grain(count, work), [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) runner.run(list[static_cast<size_t>(j)], j + 1 < end ? &list[static_cast<size_t>(j + 1)] : nullptr);
      });
    }
  }
  if (a.offsets[a.rows] < a.nodes) {
    with_scalar(a.type, [&](auto type) { clear_nodes<decltype(type)>(a, a.offsets[a.rows]); });
  }
  return problem;
}

}  // namespace specdec

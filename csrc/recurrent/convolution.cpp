#include "recurrent/convolution.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "parallel.h"

namespace specdec {
namespace {

constexpr int64_t kGrain = 1 << 16;  // multiplications or bytes per piece of work that justify another thread

// Where each node finds the inputs before its own, oldest first, [nodes, held].
std::vector<int32_t> input_sources(const PackedTrees& trees, int64_t held) {
  const int64_t used = trees.batch > 0 ? trees.offsets[trees.batch] : 0;
  std::vector<int32_t> sources(static_cast<size_t>(used * held));
  for (int64_t b = 0; b < trees.batch; ++b) {
    const int32_t first = trees.offsets[b];
    for (int32_t node = first; node < trees.offsets[b + 1]; ++node) {
      const int32_t parent = trees.parents == nullptr ? node - first - 1 : trees.parents[node];
      int32_t* own = sources.data() + node * held;
      for (int64_t i = 0; i < held; ++i) {
        own[i] = parent < 0 ? static_cast<int32_t>(-1 - i) : i + 1 < held ? sources[static_cast<size_t>((first + parent) * held + i + 1)] : first + parent;
      }
    }
  }
  return sources;
}

}  // namespace

void convolve_trees(const Convolution& call, Isa isa) {
  const RecurrentKernels& kernels = recurrent_kernels(isa);
  const PackedTrees& trees = call.trees;
  const int64_t used = trees.batch > 0 ? trees.offsets[trees.batch] : 0, tail = (call.nodes - used) * call.channels;
  with_scalar(call.inputs.type, [&](auto type) {
    std::memset(static_cast<decltype(type)*>(call.outputs) + used * call.channels, 0, static_cast<size_t>(tail) * sizeof(type));
  });
  if (used == 0) return;
  const std::vector<int32_t> sources = input_sources(trees, call.reach - 1);
  const int64_t tiles = (call.channels + kernels.tile - 1) / kernels.tile, products = (used + 4) * call.reach * kernels.tile;
  const int64_t size = convolution_scratch(call, kernels.tile);
  parallel_for(0, tiles, std::max<int64_t>(1, kGrain / products), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> memory;
    memory.resize(static_cast<size_t>(size));
    kernels.convolve(call, sources.data(), begin, end, memory.data());
  });
}

void move_windows(const WindowMoves& call, const PackedTrees& trees, const int32_t* path, int64_t depth) {
  const int64_t bytes = call.held * call.channels;
  parallel_for(0, trees.batch, std::max<int64_t>(1, kGrain / std::max<int64_t>(bytes, 1)), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> kept;
    for (int64_t b = begin; b < end; ++b) {
      kept.clear();
      std::copy_if(path + b * depth, path + (b + 1) * depth, std::back_inserter(kept), [](int32_t node) { return node >= 0; });
      if (kept.empty()) continue;
      char* own = call.window + trees.rows[b] * call.row_stride;
      const int64_t count = static_cast<int64_t>(kept.size());
      // Row i gets what was `count` rows behind it, so nothing is overwritten before it is read.
      for (int64_t i = 0; i < call.held; ++i) {
        const int64_t from = i + count;
        char* to = own + i * call.channels;
        if (from >= call.held) {
          std::memcpy(to, call.inputs + kept[static_cast<size_t>(from - call.held)] * call.channels, static_cast<size_t>(call.channels));
        } else if (trees.lengths[b] != 0) {
          std::memcpy(to, own + from * call.channels, static_cast<size_t>(call.channels));
        } else {
          std::memset(to, 0, static_cast<size_t>(call.channels));
        }
      }
    }
  });
}

}  // namespace specdec

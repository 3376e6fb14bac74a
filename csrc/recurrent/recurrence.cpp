#include "recurrent/recurrence.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "parallel.h"

namespace specdec {
namespace {

// Multiplications and elements per piece of work that justify another thread.
constexpr int64_t kGrain = 1 << 17, kElements = 1 << 15;

// Inputs of some nodes in float32. Memory is allocated for all nodes and written for those that are prepared.
class Preparation {
 public:
  Preparation(const Recurrence& call, const RecurrentKernels& kernels) : call_(call), kernels_(kernels) {
    out_.value = call.value;
    out_.state = call.state;
    out_.kind = call.kind;
    out_.row_stride = call.row_stride;
    out_.nodes = call.nodes;
    out_.heads = call.heads;
    out_.groups = call.groups;
    out_.keys = call.keys;
    out_.width = call.width;
    out_.query = add(call.query, call.groups, call.keys, kernels.widen);
    out_.key = add(call.key, call.groups, call.keys, kernels.widen);
    if (call.kind == Gate::Head) out_.gate = add(call.gate, 1, call.heads, kernels.exponentials);
    if (call.kind == Gate::Channel) out_.gate = add(call.gate, call.heads, call.keys, kernels.exponentials);
    if (call.kind == Gate::Element) out_.gate = add(call.gate, 1, call.heads * call.width, kernels.widen);
    out_.rate = add(call.rate, 1, call.heads, kernels.widen);
    if (call.rate.data != nullptr) out_.dot = dots_ = memory(call.nodes * call.groups);
    if (call.decay.data == nullptr || call.decay.type == Scalar::Float32) {
      out_.decay = static_cast<const float*>(call.decay.data);
    } else {
      float* decay = memory(call.heads * call.keys * call.width);
      kernels.widen(call.decay, decay, 0, call.heads * call.keys * call.width);
      out_.decay = decay;
    }
  }

  void prepare(int64_t begin, int64_t end) const {
    for (const Part& part : parts_) {
      if (part.rows == 1) {
        part.convert(part.from, part.to, begin * part.size, end * part.size);
        continue;
      }
      for (int64_t node = begin; node < end; ++node) {
        for (int64_t row = 0; row < part.rows; ++row) {
          part.convert(at(part.from, (node * part.rows + row) * part.size), part.to + (row * call_.nodes + node) * part.size, 0, part.size);
        }
      }
    }
    if (dots_ == nullptr) return;
    for (int64_t g = 0; g < call_.groups; ++g) kernels_.dots(out_.query, out_.key, dots_, g * call_.nodes + begin, g * call_.nodes + end, call_.keys);
  }
  void prepare_all(int64_t nodes) const {
    const int64_t each = std::max<int64_t>(1, 2 * call_.groups * call_.keys + call_.heads);
    parallel_for(0, nodes, std::max<int64_t>(1, kElements / each), [&](int64_t begin, int64_t end) { prepare(begin, end); });
  }

  PreparedRecurrence& out() { return out_; }

 private:
  using Convert = void (*)(Operand from, float* to, int64_t begin, int64_t end);
  struct Part {
    Operand from;
    float* to;
    int64_t rows, size;
    Convert convert;
  };

  static Operand at(Operand from, int64_t element) {
    const int64_t size = from.type == Scalar::Float32 ? 4 : 2;
    return {static_cast<const char*>(from.data) + element * size, from.type};
  }

  float* memory(int64_t size) {
    blocks_.push_back(std::unique_ptr<float[]>(new float[static_cast<size_t>(size)]));
    return blocks_.back().get();
  }
  // Where the float32 form of `from`, [nodes, rows, size], is or will be; it is [rows, nodes, size].
  const float* add(Operand from, int64_t rows, int64_t size, Convert convert) {
    if (from.data == nullptr || (from.type == Scalar::Float32 && convert == kernels_.widen && rows == 1)) return static_cast<const float*>(from.data);
    parts_.push_back({from, memory(call_.nodes * rows * size), rows, size, convert});
    return parts_.back().to;
  }

  const Recurrence& call_;
  const RecurrentKernels& kernels_;
  PreparedRecurrence out_;
  float* dots_ = nullptr;
  std::vector<Part> parts_;
  std::vector<std::unique_ptr<float[]>> blocks_;
};

void run_tiles(const PreparedRecurrence& call, const Visits& plan, const RecurrentKernels& kernels, TileKernel kernel) {
  int64_t most = 0;
  for (const Request& request : plan.requests) most = std::max(most, request.last - request.first);
  const int64_t tiles = call.heads * ((call.width + kernels.tile - 1) / kernels.tile);
  const int64_t products = std::max<int64_t>(1, static_cast<int64_t>(plan.visits.size()) * call.keys * kernels.tile);
  const int64_t size = scratch_of(call, plan.buffers, kernel == kernels.replay ? most : 0, kernels.tile);
  parallel_for(0, tiles, std::max<int64_t>(1, kGrain / products), [&](int64_t begin, int64_t end) {
    constexpr uintptr_t kAlignment = 64;
    static thread_local std::vector<float> memory;
    memory.resize(static_cast<size_t>(size) + kAlignment / sizeof(float));
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory.data()) + kAlignment - 1) / kAlignment * kAlignment;
    kernel(call, plan, begin, end, reinterpret_cast<float*>(start));
  });
}

}  // namespace

const RecurrentKernels& recurrent_kernels(Isa isa) {
#if defined(__x86_64__)
  if (usable(isa) == Isa::Avx512) return kAvx512Recurrent;
  if (usable(isa) == Isa::Avx2) return kAvx2Recurrent;
#endif
  (void)isa;
  return kPortableRecurrent;
}

void walk_trees(const Recurrence& call, const PackedTrees& trees, bool advance, void* outputs, float* corrections, Isa isa) {
  const RecurrentKernels& kernels = recurrent_kernels(isa);
  const int64_t used = trees.batch > 0 ? trees.offsets[trees.batch] : 0, row = call.heads * call.width, tail = (call.nodes - used) * row;
  with_scalar(call.value.type, [&](auto type) { std::memset(static_cast<decltype(type)*>(outputs) + used * row, 0, static_cast<size_t>(tail) * sizeof(type)); });
  if (corrections != nullptr) std::fill_n(corrections + used * row, tail, 0.0f);
  if (used == 0) return;
  Preparation preparation(call, kernels);
  preparation.prepare_all(used);
  preparation.out().outputs = outputs;
  preparation.out().corrections = corrections;
  run_tiles(preparation.out(), plan_visits(trees, advance), kernels, kernels.walk);
}

void replay_paths(const Recurrence& call, const PackedTrees& trees, const int32_t* path, int64_t depth, Isa isa) {
  const RecurrentKernels& kernels = recurrent_kernels(isa);
  Visits plan;
  for (int64_t b = 0; b < trees.batch; ++b) {
    const int64_t first = static_cast<int64_t>(plan.visits.size());
    for (int64_t i = 0; i < depth; ++i) {
      const int32_t node = path[b * depth + i];
      if (node >= 0) plan.visits.push_back({node, kCommitted, kCommitted});
    }
    const int64_t last = static_cast<int64_t>(plan.visits.size());
    if (last > first) plan.requests.push_back({trees.rows[b], first, last, trees.lengths[b] == 0});
  }
  if (plan.requests.empty()) return;
  Preparation preparation(call, kernels);
  for (const Visit& visit : plan.visits) preparation.prepare(visit.node, visit.node + 1);
  run_tiles(preparation.out(), plan, kernels, kernels.replay);
}

}  // namespace specdec

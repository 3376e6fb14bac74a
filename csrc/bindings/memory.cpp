// torch.ops.specdec.kv_stage, kv_commit and kv_commit_table: schemas and CPU implementations.
#include "bindings/memory.h"

#include <vector>

#include "kv_commit/kv_cpu.h"

namespace specdec::bindings {
namespace {

void reject_problem(const char* op, const KvProblem& problem, const char* remedy) {
  if (problem.text != nullptr) {
    reject(op, ": ", problem.text, " of row ", problem.row, " is ", problem.got, ", expected 0 <= value < ", problem.limit, "; ", remedy);
  }
}

void kv_stage(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  const StageArguments arguments = stage_arguments(key, value, key_cache, value_cache, slots);
  reject_problem("kv_stage", stage(arguments), "slots are page * page_size + offset");
}

void commit(const CacheLayout* layouts, int64_t count, const CommitArguments& arguments) {
  static thread_local std::vector<Move> moves;
  moves.clear();
  reject_problem("kv_commit", plan_commit(arguments, moves), "path holds packed node indices as the verify operators return them");
  apply_moves(layouts, count, moves);
  advance_lengths(arguments);
}

void kv_commit(
    const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets,
    const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  static thread_local std::vector<CacheLayout> layouts;
  list_layouts(caches, layouts);
  commit(layouts.data(), static_cast<int64_t>(layouts.size()),
         commit_arguments(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths, caches[0].size(0), caches[0].size(1)));
}

void kv_commit_table(
    const Tensor& layout, int64_t pages, int64_t page_size, const Tensor& page_table, const Tensor& lengths, const Tensor& path,
    const Tensor& offsets, const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  int64_t count = 0;
  const CacheLayout* layouts = table_layouts(layout, count);
  commit(layouts, count, commit_arguments(page_table, lengths, path, offsets, num_accepted, rows, cache_lengths, pages, page_size));
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("kv_stage(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
  m.def(
      "kv_commit(Tensor(a!)[] caches, Tensor page_table, Tensor lengths, Tensor path, Tensor offsets, "
      "Tensor num_accepted, Tensor? rows=None, Tensor(b!)? cache_lengths=None) -> ()");
  m.def(
      "kv_commit_table(Tensor layout, int pages, int page_size, Tensor page_table, Tensor lengths, Tensor path, "
      "Tensor offsets, Tensor num_accepted, Tensor? rows=None, Tensor(a!)? cache_lengths=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("kv_stage", TORCH_BOX(&specdec::bindings::kv_stage));
  m.impl("kv_commit", TORCH_BOX(&specdec::bindings::kv_commit));
  m.impl("kv_commit_table", TORCH_BOX(&specdec::bindings::kv_commit_table));
}

// torch.ops.specdec.kv_stage, kv_commit, kv_commit_table and kv_commit_pages: schemas and CPU implementations.
#include "bindings/kv_cache.h"

#include <vector>

#include "kv_cache/kv_cpu.h"

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

constexpr const char* kPaths = "path holds packed node indices as the verify operators return them";

void commit(const CacheLayout* from, const CacheLayout* to, int64_t count, const CommitArguments& arguments) {
  static thread_local std::vector<Move> moves;
  moves.clear();
  reject_problem(table_op(arguments.scratch_nodes), plan_commit(arguments, moves), kPaths);
  apply_moves(from, to, count, moves);
  advance_lengths(arguments);
}

void kv_commit(
    const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets,
    const Tensor& num_accepted, std::optional<Tensor> rows, std::optional<Tensor> cache_lengths) {
  static thread_local std::vector<CacheLayout> layouts;
  list_layouts(caches, layouts);
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  SPECDEC_CHECK(same_device(caches[0], page_table), "kv_commit: caches are on another device than page_table, expected one; move it with .to()");
  const CommitArguments arguments = commit_arguments("kv_commit", tensors, caches[0].size(0), caches[0].size(1));
  commit(layouts.data(), layouts.data(), static_cast<int64_t>(layouts.size()), arguments);
}

void kv_commit_table(
    const Tensor& layout, const Tensor& scratch_layout, int64_t pages, int64_t page_size, int64_t scratch_nodes, const Tensor& page_table,
    const Tensor& lengths, const Tensor& path, const Tensor& offsets, const Tensor& num_accepted, std::optional<Tensor> rows,
    std::optional<Tensor> cache_lengths) {
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  check_tables(table_op(scratch_nodes), layout, scratch_layout, page_table);
  const CommitArguments arguments = commit_arguments(table_op(scratch_nodes), tensors, pages, page_size, scratch_nodes);
  commit(table_layouts(scratch_layout), table_layouts(layout), layout.size(0), arguments);
}

void kv_commit_pages(
    const Tensor& page_table, const Tensor& lengths, const Tensor& path, const Tensor& offsets, const Tensor& num_accepted,
    std::optional<Tensor> rows, std::optional<Tensor> cache_lengths, const Tensor& cache_page_table) {
  const CommitTensors tensors{page_table, lengths, path, offsets, num_accepted, rows, cache_lengths};
  reject_problem("kv_commit_pages", commit_pages(pages_arguments(tensors, cache_page_table)), kPaths);
}

}  // namespace
}  // namespace specdec::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def("kv_stage(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
  m.def(
      "kv_commit(Tensor(a!)[] caches, Tensor page_table, Tensor lengths, Tensor path, Tensor offsets, "
      "Tensor num_accepted, Tensor? rows=None, Tensor(b!)? cache_lengths=None) -> ()");
  m.def(
      "kv_commit_table(Tensor layout, Tensor scratch_layout, int pages, int page_size, int scratch_nodes, Tensor page_table, "
      "Tensor lengths, Tensor path, Tensor offsets, Tensor num_accepted, Tensor? rows=None, Tensor(a!)? cache_lengths=None) -> ()");
  m.def(
      "kv_commit_pages(Tensor page_table, Tensor lengths, Tensor path, Tensor offsets, Tensor num_accepted, "
      "Tensor? rows, Tensor(a!)? cache_lengths, Tensor(b!) cache_page_table) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("kv_stage", TORCH_BOX(&specdec::bindings::kv_stage));
  m.impl("kv_commit", TORCH_BOX(&specdec::bindings::kv_commit));
  m.impl("kv_commit_table", TORCH_BOX(&specdec::bindings::kv_commit_table));
  m.impl("kv_commit_pages", TORCH_BOX(&specdec::bindings::kv_commit_pages));
}

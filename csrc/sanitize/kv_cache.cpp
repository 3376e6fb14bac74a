// kv_slots, kv_stage and the commits, on the CPU and by the threads of a GPU.
#include <algorithm>
#include <cstring>

#include "kv_cache/kv_cpu.h"
#include "kv_cache/slots.h"
#include "kv_cache/thread_work.h"
#include "sanitize/random_inputs.h"

namespace specdec::sanitize {

namespace {

// Calls function(Unit{}) with the copy unit of a GPU launch.
template <class Function>
void with_unit(int64_t bytes, const Function& function) {
  struct Sixteen {
    uint64_t low, high;
  };
  bytes == 16 ? function(Sixteen{}) : bytes == 8 ? function(uint64_t{}) : bytes == 4 ? function(uint32_t{}) : function(uint8_t{});
}

}  // namespace

void kv_cache_case(uint64_t seed) {
  Random random(seed);
  const Trees trees(random, between(random, 1, 4), 40);
  const int64_t rows = trees.rows(), nodes = trees.nodes(), tail = between(random, 0, 2);
  const int64_t page_size = one_of<int64_t>(random, {1, 5, 16}), heads = between(random, 1, 3), width = one_of<int64_t>(random, {1, 6, 64});
  std::vector<int32_t> lengths(rows);
  int64_t pages_per_row = 1;
  for (int64_t b = 0; b < rows; ++b) {
    lengths[b] = static_cast<int32_t>(between(random, 0, 50));
    pages_per_row = std::max(pages_per_row, (lengths[b] + trees.offsets[b + 1] - trees.offsets[b] + page_size - 1) / page_size);
  }
  const int64_t pages = rows * pages_per_row + 1;
  std::vector<int32_t> table, batch_rows(rows), depth(nodes + tail, 1);
  for (int64_t p = 1; p < pages; ++p) table.push_back(static_cast<int32_t>(p));
  std::shuffle(table.begin(), table.end(), random);
  for (int64_t b = 0; b < rows; ++b) batch_rows[b] = static_cast<int32_t>(b);

  // Slots of all nodes, then their entries.
  std::vector<int32_t> own_table(table.size()), own_lengths(rows);
  std::vector<int64_t> slots(nodes + tail), positions(nodes + tail);
  const SlotArguments where{table.data(), lengths.data(), batch_rows.data(), trees.offsets.data(), depth.data(), rows, pages_per_row, rows, nodes + tail, page_size, false};
  expect(place_nodes(where, {own_table.data(), own_lengths.data(), slots.data(), positions.data()}) == -1, "kv_slots", seed);

  const int64_t cells = pages * page_size * heads * width;
  const bool head_first = seed % 2;
  std::vector<float> keys(cells), values(cells), key((nodes + tail) * heads * width), value(key.size());
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<float>(i + 1), value[i] = -key[i];
  const int64_t size = sizeof(float), slot_stride = head_first ? width : heads * width, head_stride = head_first ? page_size * width : width;
  const auto layout = [&](std::vector<float>& cache) {
    return CacheLayout{reinterpret_cast<char*>(cache.data()), page_size * heads * width * size, slot_stride * size, heads, head_stride * size, width * size};
  };
  const auto entries = [&](const std::vector<float>& from) {
    return NewEntries{reinterpret_cast<const char*>(from.data()), heads * width * size, width * size};
  };
  const StageArguments staged{entries(key), entries(value), layout(keys), layout(values), slots.data(), nodes + tail, pages, page_size};
  // The threads of a GPU, run in sequence, must write the same, except to the trash slot.
  const int64_t threads = between(random, 1, 9);
  with_unit(copy_unit(alignment_bits(staged.key_cache) | alignment_bits(staged.value_cache) | alignment_bits(staged.key) | alignment_bits(staged.value)),
            [&](auto unit) {
              for (int64_t i = 0; i < nodes; ++i)
                for (int64_t t = 0; t < 2 * threads; ++t) stage_units<decltype(unit)>(staged, i, t % 2, t / 2, threads);
            });
  const std::vector<float> staged_by_threads = keys;
  std::fill(keys.begin(), keys.end(), 0.0f);
  expect(stage(staged).text == nullptr, "kv_stage", seed);
  const int64_t trash = page_size * heads * width;
  expect(std::equal(keys.begin() + trash, keys.end(), staged_by_threads.begin() + trash), "kv_stage by threads", seed);

  // The CPU rejects a slot outside the cache; the threads of a GPU skip it.
  if (nodes > 0) {
    const std::vector<int64_t> good = slots;
    const std::vector<float> before = keys;
    std::fill(slots.begin(), slots.end(), pages * page_size + between(random, 0, 1) * (int64_t{1} << 40));
    expect(stage(staged).text != nullptr, "the rejection of a slot outside the cache", seed);
    with_unit(1, [&](auto unit) {
      for (int64_t i = 0; i < nodes; ++i)
        for (int part = 0; part < 2; ++part) stage_units<decltype(unit)>(staged, i, part, 0, 1);
    });
    expect(keys == before, "a slot outside the cache", seed);
    slots = good;
  }

  // Commits a random root path of every row. Position i of a row must then hold the path's node i.
  const int64_t depth_limit = 41;
  std::vector<int32_t> path(rows * depth_limit, -1), accepted(rows, 0);
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t count = trees.offsets[b + 1] - trees.offsets[b];
    std::vector<int32_t> walk;
    for (int32_t node = count ? static_cast<int32_t>(between(random, 0, count - 1)) : -1; node >= 0; node = trees.parents[trees.offsets[b] + node]) {
      walk.insert(walk.begin(), node + trees.offsets[b]);
    }
    std::copy(walk.begin(), walk.end(), path.begin() + b * depth_limit);
    accepted[b] = walk.empty() ? 0 : static_cast<int32_t>(walk.size()) - 1;
  }
  CommitArguments commit{table.data(), lengths.data(), path.data(), trees.offsets.data(), accepted.data(), rows, pages_per_row, depth_limit, pages, page_size};
  std::vector<Move> moves;
  expect(plan_commit(commit, moves).text == nullptr, "kv_commit", seed);
  const CacheLayout caches[] = {layout(keys), layout(values)};
  std::vector<float> copy = keys;
  const CacheLayout other = layout(copy);
  with_unit(copy_unit(alignment_bits(other)), [&](auto unit) {
    for (int64_t b = 0; b < rows; ++b)
      for (int64_t t = 0; t < threads; ++t) commit_units<decltype(unit)>(other, other, commit, b, t, threads);
  });
  apply_moves(caches, caches, 2, moves);
  expect(copy == keys, "kv_commit by threads", seed);
  const auto check_committed = [&](const CacheLayout& cache, const char* what) {
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t i = 0; i < kept_tokens(commit, b); ++i) {
        const int64_t node = path[b * depth_limit + i];
        const Place place = place_of(table.data() + b * pages_per_row, lengths[b] + i, page_size);
        for (int64_t h = 0; h < heads; ++h) {
          const float* at = reinterpret_cast<const float*>(address_of(cache, place)) + h * head_stride;
          expect(std::memcmp(at, key.data() + (node * heads + h) * width, static_cast<size_t>(width * size)) == 0, what, seed);
        }
      }
    }
  };
  check_committed(caches[0], "a committed key");

  // The same from a scratch of packed nodes, whose heads are contiguous.
  const int64_t slot_bytes = heads * width * size;
  const CacheLayout scratch{reinterpret_cast<char*>(key.data()), 0, slot_bytes, 1, slot_bytes, slot_bytes};
  std::fill(keys.begin(), keys.end(), 0.0f);
  std::fill(copy.begin(), copy.end(), 0.0f);
  CommitArguments copies = commit;
  copies.scratch_nodes = nodes + tail;
  moves.clear();
  expect(plan_commit(copies, moves).text == nullptr, "kv_commit_scratch", seed);
  apply_moves(&scratch, &caches[0], 1, moves);
  with_unit(copy_unit(alignment_bits(other) | alignment_bits(scratch)), [&](auto unit) {
    for (int64_t b = 0; b < rows; ++b)
      for (int64_t t = 0; t < threads; ++t) commit_units<decltype(unit)>(scratch, other, copies, b, t, threads);
  });
  expect(copy == keys, "kv_commit_scratch by threads", seed);
  check_committed(caches[0], "a key from a scratch");

  // Page ids: threads and operator write the same permutation, with the accepted nodes first.
  const int64_t columns = pages_per_row * page_size;
  std::vector<int32_t> ids(rows * columns), cache_lengths(rows), by_threads;
  for (int64_t i = 0; i < rows * columns; ++i) ids[i] = static_cast<int32_t>(i);
  std::vector<int32_t> moved = by_threads = ids;
  CommitArguments page_ids{ids.data(), lengths.data(), path.data(), trees.offsets.data(), accepted.data(), rows, columns, depth_limit, 0, 1};
  page_ids.cache_lengths = cache_lengths.data();
  page_ids.cache_rows = batch_rows.data();
  page_ids.cache_capacity = rows;
  page_ids.cache_table = by_threads.data();
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < threads; ++t) commit_page_ids(page_ids, b, t, threads);
  page_ids.cache_table = moved.data();
  expect(commit_pages(page_ids).text == nullptr && moved == by_threads, "kv_commit_pages", seed);
  for (int64_t b = 0; b < rows; ++b) {
    expect(cache_lengths[b] == lengths[b] + kept_tokens(page_ids, b), "lengths of kv_commit_pages", seed);
    for (int64_t i = 0; i < kept_tokens(page_ids, b); ++i) {
      const int64_t node = path[b * depth_limit + i] - trees.offsets[b];
      expect(moved[b * columns + lengths[b] + i] == ids[b * columns + lengths[b] + node], "a page of an accepted node", seed);
    }
  }
  std::sort(moved.begin(), moved.end());
  expect(moved == ids, "lost pages", seed);

  accepted[0] = depth_limit;
  moves.clear();
  expect(plan_commit(commit, moves).text != nullptr, "the rejection of an invalid commit", seed);
  expect(commit_pages(page_ids).text != nullptr, "the rejection of an invalid commit of pages", seed);
}

}  // namespace specdec::sanitize

"""PagedCache: layout of staged nodes, commits, rollbacks, reservations and forks."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from oracles.ledger import Ledger, cache, random_path, random_tree

from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.shapes import LayerShape
from specdec_fast.core.device_transfer import write_entries

PAGE_SIZES = (1, 4, 16, 256)


def ledger(lengths: dict[int, int], **shape: int) -> Ledger:
    """Returns a ledger whose rows hold some tokens."""
    made = Ledger(cache(**shape))
    for row, length in lengths.items():
        made.rows[row] = []
        assert made.cache.reserve(row, max(length, 1))
        if length:
            made.step({row: list(range(-1, length - 1))}, {row: list(range(length))}, chain=True)
    made.check()
    return made


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chain", [False, True])
def test_a_batch_of_every_shape(page_size: int, chain: bool) -> None:
    """Rows of different lengths, one without nodes, followed by tail nodes."""
    made = ledger({0: 5, 2: 0, 3: 9, 4: 16}, page_size=page_size, num_pages=70)
    for row, length in ((0, 12), (2, 4), (3, 10), (4, 20)):
        assert made.cache.reserve(row, length)
    trees = {3: [-1], 0: [-1, 0, 0, 1, 1, 3], 4: [], 2: [-1, 0, 1, 0]}
    paths = {3: [0], 0: [0, 1, 4], 4: [], 2: [0, 3]}
    if chain:
        trees = {row: list(range(-1, len(tree) - 1)) for row, tree in trees.items()}
        paths = {row: list(range(len(path))) for row, path in paths.items()}
    made.step(trees, paths, tail=3, chain=chain)
    made.check()
    assert made.cache.lengths.tolist() == [8, 0, 2, 10, 16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tail_nodes_of_a_single_row_go_to_the_trash(page_size: int) -> None:
    made = ledger({1: 62}, page_size=page_size, num_pages=70)
    assert made.cache.reserve(1, 64)
    made.step({1: [-1, 0]}, {1: [0, 1]}, tail=9)
    made.check()


def test_an_empty_batch_and_a_batch_of_tail_nodes() -> None:
    made = ledger({1: 3})
    made.step({1: []}, {1: []}, tail=2)
    made.check()
    assert made.cache.lengths.tolist() == [0, 3, 0, 0, 0]


def test_a_pool_beyond_the_memory_names_its_size_and_what_to_lower() -> None:
    wide = [LayerShape(10**7, 128, 128)]
    words = "got 10000 pages of 16 tokens, which take 1,525,878.9 GiB and do not fit into the memory of cpu; .*; lower"
    with pytest.raises(ValueError, match=words):
        PagedCache(wide, num_pages=10_000, page_size=16, max_rows=1, max_length=64, dtype=torch.float32)


def test_other_failures_of_the_device_are_not_called_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        PagedCache([LayerShape(1, 8, 8)], num_pages=2, page_size=16, max_rows=1, max_length=16, dtype=torch.float32)


def test_rejected_nodes_are_dropped() -> None:
    made = ledger({0: 3})
    assert made.cache.reserve(0, 12)
    made.step({0: [-1, 0, 0, 2]}, {0: [0]})
    made.check()
    made.step({0: [-1, 0, 1]}, {0: [0, 1, 2]})
    made.check()
    assert len(made.rows[0]) == 7


def test_known_tokens_are_committed_in_place() -> None:
    made = ledger({0: 3, 2: 6})
    assert made.cache.reserve(0, 8) and made.cache.reserve(2, 8)
    rows, bounds = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 1, 5], dtype=torch.int32)
    plain = made.cache.stage(rows, bounds, 7)
    made.check()
    advanced = made.cache.stage(rows, bounds, 7, advance=True)
    assert made.cache.lengths.tolist() == [7, 0, 7, 0, 0]
    assert torch.equal(plain.slots, advanced.slots) and torch.equal(plain.lengths, advanced.lengths)
    assert advanced.lengths.tolist() == [6, 3]


@pytest.mark.parametrize("seed", range(6))
def test_chains_are_committed_by_their_lengths_alone(seed: int) -> None:
    """The lengths equal those of `kv_commit`, for rows without nodes and paths of any length."""
    source = random.Random(seed)
    counts = [source.choice([0, 1, 4]) for _ in range(3)]
    accepted = [source.randrange(max(count, 1)) for count in counts]
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    path = torch.full((3, 5), -1, dtype=torch.int32)
    for row, (start, count, kept) in enumerate(zip(bounds.tolist(), counts, accepted, strict=False)):
        path[row, : min(kept + 1, count)] = torch.arange(start, start + min(kept + 1, count), dtype=torch.int32)
    found = []
    for chains in (None, [4, 0, 2]):
        made = ledger({0: 3, 2: 6, 4: 1})
        for row in (0, 2, 4):
            assert made.cache.reserve(row, 12)
        slots = made.cache.stage(torch.tensor([4, 0, 2], dtype=torch.int32), bounds, sum(counts))
        before = [each.clone() for each in (*made.cache.keys, *made.cache.values)]
        rows, kept_of = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor(accepted, dtype=torch.int32)
        made.cache.commit(rows, slots, path, kept_of, chains)
        assert all(map(torch.equal, before, (*made.cache.keys, *made.cache.values)))
        found.append(made.cache.lengths.tolist())
    assert found[0] == found[1] == [
        3 + min(accepted[1] + 1, counts[1]), 0, 6 + min(accepted[2] + 1, counts[2]), 0,
        1 + min(accepted[0] + 1, counts[0]),
    ]  # fmt: skip


@pytest.mark.parametrize("host", [False, True])
def test_rollback_truncates_to_absolute_lengths(host: bool) -> None:
    made = ledger({0: 9, 2: 5})
    rows, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    made.cache.rollback(*([rows.tolist(), lengths.tolist()] if host else [rows, lengths]))
    made.rows = {0: made.rows[0][:6], 2: []}
    made.check()
    made.step({2: [-1, 0], 0: [-1]}, {2: [0, 1], 0: [0]})
    made.check()


@pytest.mark.parametrize(("length", "held"), [(-1, 5), (6, 5), (10, 5)])
def test_rollback_refuses_lengths_that_a_row_does_not_have(length: int, held: int) -> None:
    """Nothing changes, for the other rows neither; a copy has the same checks."""
    made = ledger({0: 9, 2: held}).cache
    for each in (made, copy.deepcopy(made)):
        with pytest.raises(ValueError, match=f"rollback: got length {length} for row 2; expected 0 to {held}, which"):
            each.rollback([0, 2], [3, length])
        assert each.lengths.tolist()[:3] == [9, 0, held]
        each.rollback([2, 1], [held, 0])
    with pytest.raises(ValueError, match="zip"):
        made.rollback([0, 2], [3])
    with pytest.raises(ValueError, match="rollback: got 1 lengths for 2 rows; expected one for each"):
        made.rollback(torch.tensor([0, 2]), torch.tensor([3], dtype=torch.int32))
    assert made.lengths.tolist()[:3] == [9, 0, held]


def test_beside_the_host_the_pages_of_a_row_bound_its_length() -> None:
    """The host does not know committed lengths there."""
    made = ledger({0: 5}).cache
    made.device, made._host_lengths = torch.device("cuda"), None
    made.rollback([0], [8])
    assert made.lengths[0] == 8 and made.page_size == 4
    for length in (-1, 9):
        with pytest.raises(ValueError, match=f"got length {length} for row 0; expected 0 to 8"):
            made.rollback([0], [length])


def test_staged_nodes_may_become_committed() -> None:
    made = ledger({0: 6})
    made.cache.rollback([0], [5])
    made.cache.set_lengths([0], [6])
    made.check()
    for length in (-1, 9):
        with pytest.raises(ValueError, match=f"got length {length} for row 0; expected 0 to 8, for which it has pages"):
            made.cache.set_lengths([0], [length])
    made.check()


def test_a_copy_has_its_own_lengths() -> None:
    made = ledger({0: 9}).cache
    copied = copy.deepcopy(made)
    copied.rollback([0], [4])
    assert copied.lengths[0] == 4 and made.lengths[0] == 9
    made.rollback([0], [2])
    assert copied.lengths[0] == 4 and made.lengths[0] == 2


def test_reserving_is_all_or_nothing() -> None:
    made = cache(num_pages=4, page_size=4)
    assert made.reserve(0, 8) and made.pages.num_free == 1
    assert not made.reserve(1, 5) and made.pages.num_free == 1 and made.page_table[1].tolist() == [0] * 16
    assert made.reserve(0, 3) and made.pages.num_free == 1, "a smaller wish gives nothing back"
    assert made.reserve(1, 4) and not made.reserve(0, 9)
    with pytest.raises(ValueError, match="got length 65 for row 0; expected at most 64"):
        made.reserve(0, 65)


def test_releasing_twice_is_harmless() -> None:
    made = ledger({0: 9, 1: 2})
    made.release(0)
    made.cache.release([0, 3])
    made.check()
    made.release(1)
    assert made.cache.pages.num_used == 0


@pytest.mark.parametrize("page_size", [0, 257])
def test_bad_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size: got {page_size}; expected 1..256"):
        cache(page_size=page_size)


@pytest.mark.parametrize("length", [0, 3, 4, 8, 10])
def test_a_fork_shares_whole_pages_and_copies_the_last(length: int) -> None:
    made = ledger({0: 10})
    before = made.cache.pages.num_used
    assert made.cache.fork(0, 3, length)
    made.rows[3] = made.rows[0][:length]
    made.check()
    assert made.cache.pages.num_used == before + (1 if length % 4 else 0)
    for row in (3, 0):  # both continue, and neither sees the other's tokens
        assert made.cache.reserve(row, len(made.rows[row]) + 5)
        made.step({row: [-1, 0, 0, 1, 3]}, {row: [0, 1, 3]})
        made.check()
    made.release(0)
    made.check()
    made.release(3)
    assert made.cache.pages.num_used == 0


def test_a_fork_needs_an_empty_row_and_room() -> None:
    made = ledger({0: 6, 1: 4}, num_pages=4)
    with pytest.raises(ValueError, match="row 1 already holds pages; release it first"):
        made.cache.fork(0, 1, 4)
    assert not made.cache.fork(0, 2, 6)
    made.check()
    assert made.cache.fork(0, 2, 4)
    made.rows[2] = made.rows[0][:4]
    made.check()


def test_an_interrupted_fork_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ledger({0: 10})
    before = made.cache.pages.num_used

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specdec_fast.cache.paged.upload_values", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.cache.fork(0, 3, 10)
    assert made.cache.pages.num_used == before
    made.check()
    made.release(0)
    assert made.cache.pages.num_used == 0


def test_pages_that_an_interrupted_release_has_lost_return_with_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody claims the cache of a draft model, so it must heal by itself."""
    made = ledger({0: 10, 1: 3})
    with monkeypatch.context() as patch:
        patch.setattr(made.cache.pages, "free", lambda _pages: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.cache.release([0])
    made.cache.release([0])
    assert made.cache.pages.num_used > made.cache.pages_for(3), "pages are lost while another row needs its own"
    made.cache.release([1])
    assert made.cache.pages.num_used == 0


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(2))
def test_many_steps_of_random_trees(seed: int, page_size: int) -> None:
    source = random.Random(seed)
    made = ledger({row: source.randrange(5) for row in range(4)}, page_size=page_size, num_pages=300, max_length=120)
    for _ in range(25):
        rows = source.sample(range(4), source.randrange(1, 5))
        trees = {row: random_tree(source, source.randrange(12)) for row in rows}
        if any(len(made.rows[row]) + len(tree) > 120 for row, tree in trees.items()):
            break
        for row, tree in trees.items():
            assert made.cache.reserve(row, len(made.rows[row]) + len(tree))
        made.step(trees, {row: random_path(source, tree) for row, tree in trees.items()}, tail=source.randrange(3))
        made.check()


class Elsewhere(torch.Tensor):
    """A tensor that reports another device."""

    is_cpu = False


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_host_numbers_are_written_at_rows(kind: type[torch.Tensor]) -> None:
    place = torch.arange(5, dtype=torch.int32).as_subclass(kind)
    assert place.is_cpu == (kind is torch.Tensor)
    write_entries([3, 0], [7, 9], place)
    write_entries([], [], place)
    assert place.tolist() == [9, 1, 2, 7, 4]
    with pytest.raises((ValueError, RuntimeError)):
        write_entries([1, 2, 3], [5, 6], place)

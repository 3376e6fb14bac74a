"""States of recurrent layers: their verbs, what a node costs, and bad input."""

from __future__ import annotations

import pytest
import torch
from oracles.hybrid_models import int32

from specdec_fast.cache.hybrid import HybridCache, make_cache
from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.recurrent_states import Record, RecurrentStates
from specdec_fast.cache.shapes import LayerShape, StateShape, WindowShape

SHAPES = (WindowShape(3, 8), StateShape(heads=2, key_dim=4, value_dim=5, groups=1, gates=2))


def states(rows: int = 3) -> RecurrentStates:
    return RecurrentStates(SHAPES, max_rows=rows, dtype=torch.float32)


def staged(nodes: int) -> RecurrentStates:
    """States with records of some nodes."""
    made, generator = states(), torch.Generator().manual_seed(nodes)
    made.inputs[0] = torch.randn(nodes, 8, generator=generator)
    made.records[1] = Record(
        torch.randn(nodes, 1, 4, generator=generator),
        torch.randn(nodes, 2, 5, generator=generator),
        -torch.rand(nodes, 2, generator=generator),
    )
    return made


def test_a_commit_replays_the_path_and_nothing_else() -> None:
    made = staged(4)
    record, inputs = made.records[1], made.inputs[0]
    made.commit(int32(2), int32(0), torch.tensor([[0, 2, -1]], dtype=torch.int32))
    state = torch.zeros(2, 4, 5)
    for node in (0, 2):
        added = record.key[node][0][:, None] * record.value[node][:, None, :]
        state = state * record.log_gate[node].exp()[:, None, None] + added
    torch.testing.assert_close(made.states[1][2], state)
    assert torch.equal(made.windows[0][2], torch.stack([torch.zeros(8), inputs[0], inputs[2]]))
    assert not made.states[1][:2].any() and not made.windows[0][:2].any()


def test_records_are_used_once() -> None:
    """A pass that writes no record of a place cannot be committed, and no state changes."""
    made = staged(2)
    path = torch.tensor([[0, 1]], dtype=torch.int32)
    made.commit(int32(0), int32(0), path)
    kept = made.states[1].clone()
    with pytest.raises(RuntimeError, match="no records of 2 of 2 places"):
        made.commit(int32(0), int32(2), path)
    half = staged(2)
    half.records.clear()
    with pytest.raises(RuntimeError, match="no records of 1 of 2 places"):
        half.commit(int32(0), int32(0), path)
    assert torch.equal(made.states[1], kept) and not half.windows[0].any()


def test_a_text_of_no_tokens_starts_empty() -> None:
    """A released row keeps its old state in memory; the next text does not see it."""
    made = staged(1)
    made.states[1].fill_(7.0)
    made.windows[0].fill_(7.0)
    record = made.records[1]
    made.commit(int32(1), int32(0), torch.tensor([[0]], dtype=torch.int32))
    added = record.key[0][0][:, None] * record.value[0][:, None, :]
    torch.testing.assert_close(made.states[1][1], added)
    assert not made.windows[0][1, :2].any()


def test_a_node_costs_its_record() -> None:
    """Qwen3-Next: 36 layers with a state of 2 MiB each. A node costs at most 1.5 MiB of all layers in bfloat16."""
    window, state = WindowShape(3, 8192), StateShape(heads=32, key_dim=128, value_dim=128, groups=16, gates=32)
    layers = (window, state) * 36
    with torch.device("meta"):
        made = RecurrentStates(layers, max_rows=1, dtype=torch.bfloat16, device="meta")
    mebibyte = 2**20
    assert made.bytes_per_node(torch.bfloat16) <= 1.5 * mebibyte
    assert 72 * mebibyte <= made.bytes_per_row(torch.bfloat16) <= 75 * mebibyte


def test_states_that_do_not_fit_are_named() -> None:
    huge = StateShape(heads=2**14, key_dim=2**14, value_dim=2**14, groups=1, gates=1)
    with pytest.raises(ValueError, match=r"recurrent states, which take .* GiB .*; lower max_rows"):
        RecurrentStates([huge], max_rows=8, dtype=torch.float32)


def hybrid() -> HybridCache:
    made = make_cache(
        [LayerShape(1, 4, 4)], SHAPES, num_pages=9, page_size=4, max_rows=3, max_length=16, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    assert isinstance(made, HybridCache)
    return made


def test_rows_are_not_truncated() -> None:
    cache = hybrid()
    cache.reserve(0, 5)
    cache.stage(int32(0), int32(0, 5), 5, advance=True)
    cache.rollback([0], [5])
    cache.rollback(int32(0), int32(5))
    cache.set_lengths([0], [5])
    for verb in (cache.rollback, cache.set_lengths):
        with pytest.raises(ValueError, match=r"got length 3 for row 0 of 5 tokens; expected 5.*release the row"):
            verb([0], [3])
    assert cache.lengths.tolist() == [5, 0, 0]


def test_a_fork_copies_the_states() -> None:
    cache = hybrid()
    cache.reserve(0, 6)
    cache.stage(int32(0), int32(0, 6), 6, advance=True)
    cache.recurrent.states[1][0] = 3.0
    with pytest.raises(ValueError, match="fork: got length 4"):
        cache.fork(0, 1, 4)
    assert cache.fork(0, 1, 6) and cache.lengths.tolist() == [6, 6, 0]
    assert bool((cache.recurrent.states[1][1] == 3.0).all()) and not cache.recurrent.states[1][2].any()


def test_models_without_recurrent_layers_have_pages_alone() -> None:
    made = make_cache(
        [LayerShape(1, 4, 4)], [], num_pages=3, page_size=4, max_rows=1, max_length=8, dtype=torch.float32, device="cpu"
    )
    assert type(made) is PagedCache and made.why_no_rollback is None

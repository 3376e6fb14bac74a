"""kv_slots: every backend against a list-of-lists model, over ragged batches, tail nodes and bad arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import kv_slots, use_backend

BACKENDS = [backend.name for backend in kv_slots.backends if backend.name != "triton"]  # see tests/interpreter


def served(backend: str) -> bool:
    return next(b for b in kv_slots.backends if b.name == backend).missing() is None


@st.composite
def batches(draw: st.DrawFn) -> dict:
    page_size = draw(st.sampled_from([1, 3, 16]))
    capacity, pages = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rows = draw(st.lists(st.integers(0, capacity - 1), unique=True, max_size=capacity))
    room = pages * page_size
    lengths = [draw(st.integers(0, room)) for _ in range(capacity)]
    counts = [draw(st.integers(0, min(room - lengths[row], 7))) for row in rows]
    seed = draw(st.integers(0, 2**16))
    table = torch.randint(1, 99, (capacity, pages), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tail, with_depth = draw(st.integers(0, 3)), draw(st.booleans())
    nodes = sum(counts) + tail
    depth = [draw(st.integers(0, 9)) for _ in range(nodes)] if with_depth else None
    return {
        "table": table, "lengths": lengths, "rows": rows, "counts": counts, "nodes": nodes, "depth": depth,
        "page_size": page_size, "advance": draw(st.booleans()),
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(case=batches())
def test_every_node_is_placed_after_its_row(backend: str, case: dict) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    offsets = [0]
    for count in case["counts"]:
        offsets.append(offsets[-1] + count)
    ints = {"dtype": torch.int32}
    depth = None if case["depth"] is None else torch.tensor(case["depth"], **ints)
    own = torch.tensor(case["lengths"], **ints)
    with use_backend(backend):
        table, lengths, slots, positions = kv_slots(
            case["table"],
            own,
            torch.tensor(case["rows"], **ints),
            torch.tensor(offsets, **ints),
            depth,
            case["nodes"],
            case["page_size"],
            case["advance"],
        )
    grown = list(case["lengths"])
    for row, count in zip(case["rows"], case["counts"]):
        grown[row] += count * case["advance"]
    assert own.tolist() == grown
    assert kv_slots.last_backend == backend
    assert table.tolist() == [case["table"][row].tolist() for row in case["rows"]]
    assert lengths.tolist() == [case["lengths"][row] for row in case["rows"]]
    want_slots, want_positions = [-1] * case["nodes"], [0] * case["nodes"]
    for index, row in enumerate(case["rows"]):
        for node in range(offsets[index], offsets[index + 1]):
            at = case["lengths"][row] + node - offsets[index]
            page = int(case["table"][row, at // case["page_size"]])
            want_slots[node] = page * case["page_size"] + at % case["page_size"]
            want_positions[node] = at if depth is None else case["lengths"][row] + case["depth"][node]
    assert slots.tolist() == want_slots and slots.dtype == torch.int64
    assert positions.tolist() == want_positions and positions.dtype == torch.int64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "offsets", "lengths"),
    [
        ([2], [0, 1], [0, 0]),
        ([-1], [0, 1], [0, 0]),
        ([0], [0, 3], [0, 0]),
        ([0], [0, 2], [7, 0]),
        ([0, 1], [0, 2, 1], [0, 0]),
    ],
    ids=["row beyond", "row negative", "more nodes than there are", "no room", "offsets decrease"],
)
def test_misfits_are_refused(backend: str, rows: list[int], offsets: list[int], lengths: list[int]) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    ints = {"dtype": torch.int32}
    table = torch.ones(2, 2, **ints)
    with use_backend(backend), pytest.raises(ValueError, match=r"kv_slots.*expected"):
        kv_slots(
            table,
            torch.tensor(lengths, **ints),
            torch.tensor(rows, **ints),
            torch.tensor(offsets, **ints),
            None,
            2,
            4,
        )

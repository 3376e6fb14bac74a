"""Debug mode: data that a launch does not check is checked as in the references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles.packed_trees import Shape, build
from oracles.proposal_cases import int32

from specdec_kernels import (
    OPS,
    CacheTable,
    kv_commit,
    kv_commit_pages,
    kv_commit_scratch,
    kv_slots,
    kv_stage,
    tree_attention,
    tree_plan,
)
from specdec_kernels.dispatch import debug_mode, torch_ops


@pytest.fixture(autouse=True)
def debugging(monkeypatch: pytest.MonkeyPatch, on_triton: None) -> Iterator[None]:
    monkeypatch.setattr(debug_mode, "ENABLED", True)
    forget()
    yield
    forget()


def forget() -> None:
    torch_ops._find_launch.cache_clear()
    for op in OPS.values():
        op.clear_choices()


def attention(**change: Any) -> None:
    case = build(Shape([4], [10]))
    names = ("query", "key_cache", "value_cache", "page_table", "lengths", "offsets", "ancestors")
    tree_attention(**dict(zip(names, (*case.cache, case.ancestors), strict=True)) | change, scale=0.1)


def slots(**change: Any) -> None:
    given = {"page_table": torch.ones(2, 2, dtype=torch.int32), "lengths": int32([7, 0]), "rows": int32([0, 1])}
    kv_slots(**given | {"offsets": int32([0, 1, 3]), "depth": None, "nodes": 3, "page_size": 4} | change)


def stage(**change: Any) -> None:
    case, new = build(Shape([1], [3])), torch.ones(1, 2, 64)
    given = {"key": new, "value": new, "key_cache": case.key_cache, "value_cache": case.value_cache}
    kv_stage(**given | {"slots": torch.tensor([4])} | change)


def commit(what: str = "in place", **change: Any) -> None:
    case = build(Shape([4], [10]))
    table = CacheTable([case.key_cache])
    trees = {"page_table": case.page_table, "lengths": case.lengths, "path": int32([0, 2, 3])[None]}
    trees |= {"offsets": case.offsets, "num_accepted": int32([2]), "rows": int32([0]), "cache_lengths": int32([0, 0])}
    given = list((trees | change).values())
    if what == "scratch":
        kv_commit_scratch(table, CacheTable.packed([torch.ones(4, 2, 64)]), *given)
    elif what == "pages":
        kv_commit_pages(torch.arange(20).int()[None], *given[1:], torch.zeros(2, 20, dtype=torch.int32))
    else:
        kv_commit(table, *given)


def plan(**change: Any) -> None:
    tree_plan(**{"parents": int32([-1, 0, 1]), "offsets": int32([0, 3])} | change)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (plan, {"parents": int32([-1, 2, 1])}, "node 1 has parent 2; expected an index within the row"),
    (plan, {"parents": int32([-1, 1, 0])}, "every parent precedes its children"),
    (plan, {"offsets": int32([0, 9])}, "tree_plan: offsets"),
    (attention, {"page_table": torch.full((1, 9), 99, dtype=torch.int32)}, "row 0 of page_table names pages outside"),
    (attention, {"lengths": int32([10**6])}, "row 0 needs 1000004 slots"),
    (attention, {"offsets": int32([0, 9])}, "tree_attention: offsets"),
    (slots, {"rows": int32([0, 5])}, "expected row ids below 2"),
    (slots, {"lengths": int32([8, 0])}, "0 to 8 tokens a row"),
    (stage, {"slots": torch.tensor([10**6])}, "slot 1000000 is outside the cache"),
    (commit, {"page_table": torch.full((1, 9), 99, dtype=torch.int32)}, "kv_commit: page_table of row 0"),
    (commit, {"lengths": int32([-1])}, "kv_commit: lengths of row 0 is -1"),
    (commit, {"path": int32([0, 2, 4])[None]}, r"path of row 0 is \[0, 2, 4\]; expected nodes 0 to 3"),
    (commit, {"num_accepted": int32([3])}, "num_accepted of row 0 is 3"),
    (commit, {"rows": int32([2])}, "rows of row 0 is 2; expected a row of cache_lengths"),
    (commit, {"what": "scratch", "offsets": int32([0, 9]), "path": int32([0, 2, 4])[None]}, "nodes below 4, the scr"),
    (commit, {"what": "pages", "lengths": int32([18])}, "kv_commit_pages: lengths of row 0 is 18; expected space for"),
]


@pytest.mark.parametrize(("call", "change", "words"), WRONG, ids=[each[2] for each in WRONG])
def test_wrong_data_is_refused_and_good_data_is_not(call: Any, change: dict[str, Any], words: str) -> None:
    call(**{name: value for name, value in change.items() if name == "what"})
    with pytest.raises(ValueError, match=words):
        call(**change)


def test_values_are_not_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_mode, "is_capturing", lambda: True)
    stage(slots=torch.tensor([10**6]))


def test_calls_of_the_registered_operators_are_checked() -> None:
    """Compiled programs call them."""
    case, new = build(Shape([1], [3])), torch.ones(1, 2, 64)
    registers = torch_ops.register_launches("CPU", override=True)
    try:
        torch.ops.specdec.kv_stage(new, new, case.key_cache, case.value_cache, torch.tensor([4]))
        assert torch.equal(case.key_cache.flatten(0, 1)[4], new[0])
        with pytest.raises(ValueError, match="slot 1000000 is outside the cache"):
            torch.ops.specdec.kv_stage(new, new, case.key_cache, case.value_cache, torch.tensor([10**6]))
    finally:
        registers._destroy()


def test_a_check_changes_nothing() -> None:
    """kv_slots checks with its reference, which advances lengths; they advance once, by the launch."""
    lengths = int32([3, 0])
    slots(lengths=lengths, advance=True)
    assert lengths.tolist() == [4, 2]

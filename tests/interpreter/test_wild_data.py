"""Integers that no host looks at: launches touch no memory but that of their tensors, whatever the integers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from oracles.interpreter import watched, wrapping
from torch import Tensor

from specdec_kernels import OPS, Forced, Growth, attention_plan, expect, law_stats, tree_attention, use_backend
from specdec_kernels.agreement import mapped, sample, tensors_in
from specdec_kernels.samples import Call, Sizes, int32

SIZES = Sizes(rows=3, nodes=4, length=20, heads=2, kv_heads=1, width=16, vocab=130)
SEEDS = range(3)
WILD = (-1000, -1, 13, 1000, 1000)
FAR = (2**31 - 1, 0, 2), (2**31 - 500, 1, 2), (-(2**31), 0, 1)
"""Numbers at the ends of 32 bits; which of a tensor is the first to be one, and how far they are apart."""
INTEGERS = (torch.int8, torch.int32, torch.int64)


def drafted(name: str, **options: Any) -> Call:
    """A verify operator whose tokens were drawn from laws over part of the vocabulary."""
    call = sample(name, SIZES)
    place = next(at for at, each in enumerate(call.arguments) if isinstance(each, tuple))
    nodes = len(call.arguments[0])
    one = torch.ones(2)
    level = torch.randn(2, 40)
    law = (level, *law_stats(level, one, one.int() * 0, one, one * 0))
    arguments = list(call.arguments)
    arguments[place - 2 : place] = torch.arange(nodes).to(torch.int8) % 4, torch.arange(nodes).int() % 2
    arguments[place + 1 : place + 3] = law, torch.arange(40) * 3
    return replace(call, arguments=tuple(arguments), options=call.options | options)


def edited() -> Call:
    """All four kinds of edits."""
    call = sample("edit_logits", SIZES)
    entries = Forced(int32([0, 1, 2, 3]), int32([21, 21, 22]), int32([3, 4, 5]))
    return replace(call, arguments=(*call.arguments[:4], entries, call.arguments[5]))


def windowed(sizes: Sizes = SIZES) -> Call:
    call = sample("tree_attention", sizes)
    return replace(call, options=call.options | {"window": 9})


def grown() -> Call:
    """The second level of trees whose first may be anything."""
    call = sample("tree_grow", SIZES)
    growth = Growth.room(int32([8] * SIZES.rows), 8, 2)
    for part, value in ((growth.tokens, 1), (growth.scores, -1.0), (growth.parents, 0), (growth.nodes, 1)):
        part.fill_(value)
    keys = {"seeds": torch.arange(SIZES.rows), "positions": int32([5] * SIZES.rows)}
    return replace(call, arguments=(*call.arguments[:5], growth), options={"level": 1, "width": 4, **keys})


NUMBERS = {"law_stats", "draw_sample", "replay_sample"}
"""Operators whose integers are numbers and no places."""
PARTS = {"chain_verify_logits", "ordered_thresholds", "traversal_thresholds"}
"""Operators made of what others launch."""
PLAIN = (
    "tree_attention", "attention_plan", "kv_stage", "kv_slots", "kv_commit", "kv_commit_scratch", "kv_commit_pages",
    "tree_plan", "tree_expand", "tree_grow", "tree_verify", "replay_verify", "typical_verify", "ngram_match",
)  # fmt: skip
CASES: dict[str, Callable[[], Call]] = {
    **{name: partial(sample, name, SIZES) for name in PLAIN},
    "chain_verify": partial(drafted, "chain_verify"),
    "chain_verify by the block rule": partial(drafted, "chain_verify", rule="block"),
    "chain_thresholds": partial(drafted, "chain_thresholds"),
    "ordered_verify": partial(drafted, "ordered_verify"),
    "traversal_verify": partial(drafted, "traversal_verify"),
    "edit_logits": edited,
    "tree_attention with a window": windowed,
    "tree_grow on the second level": grown,
}


def made_wild(call: Call, seed: int) -> Call:
    """The call with about half of its tensors of integers changed, in most of their numbers."""
    g = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        wild = torch.tensor(WILD)[torch.randint(len(WILD), tensor.shape, generator=g)]
        share = 0.6 if float(torch.rand((), generator=g)) < 0.5 else 0.0
        if tensor.dtype not in INTEGERS:
            return tensor.clone()
        return torch.where(torch.rand(tensor.shape, generator=g) < share, wild.to(tensor.dtype), tensor)

    return mapped(call, change)


def test_all_launches_are_among_the_cases() -> None:
    known = {case.partition(" ")[0] for case in CASES} | NUMBERS | PARTS
    assert known == {name for name, op in OPS.items() if any(each.name == "triton" for each in op.backends)}


@pytest.mark.parametrize("case", CASES)
def test_no_integer_leads_out_of_the_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expect, "readable", lambda value: False)
    name, plain = case.split(" ")[0], CASES[case]()
    for seed in SEEDS:
        call = made_wild(plain, seed)
        with use_backend("triton"), watched(*tensors_in(call.arguments)):
            found = OPS[name](*call.arguments, **call.options)
        if "max_depth" in call.options:
            path, accepted, _ = found[:3]
            assert bool(((path >= -1) & (path < len(call.arguments[0]))).all()), "a path leaves the nodes"
            assert bool(((accepted >= 0) & (accepted < path.shape[1])).all())


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.tree_attention import launch

    monkeypatch.setattr(launch, "_processors", lambda device: 3)


def attend_by_plan(call: Call) -> None:
    query, keys, _, table, lengths, offsets, *_ = call.arguments
    from specdec_kernels.tree_attention.launch import plan_numbers

    with use_backend("triton"), watched():
        plan = attention_plan(lengths, offsets, len(query), **plan_numbers(query, keys, table))
        tree_attention(*call.arguments, **call.options, plan=plan)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("few_programs")
def test_a_plan_of_wild_lengths_and_offsets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expect, "readable", lambda value: False)
    attend_by_plan(made_wild(sample("tree_attention", SIZES), seed))


def made_far(call: Call) -> Iterator[Call]:
    """The call with one tensor of integers after the other changed."""

    def change(tensor: Tensor, wanted: Tensor, number: int, first: int, step: int) -> Tensor:
        changed = tensor.clone()
        if tensor is wanted:
            changed.view(-1)[first::step] = number
        return changed

    for wanted in [each for each in tensors_in(call.arguments) if each.dtype in INTEGERS]:
        for number, first, step in FAR:
            yield mapped(call, partial(change, wanted=wanted, number=number, first=first, step=step))


FEW = replace(SIZES, rows=2, layers=1)
BY_PLAN = "tree_attention by a plan"


@pytest.mark.parametrize("case", [BY_PLAN, *(each for each in CASES if each.startswith(("tree_attention", "kv_")))])
@pytest.mark.usefixtures("few_programs")
def test_numbers_that_are_nearly_too_large_lead_nowhere_else(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to no loop that is nearly endless."""
    monkeypatch.setattr(expect, "readable", lambda value: False)
    name = case.split(" ")[0]
    plain = windowed(FEW) if case.endswith("a window") else sample(name, FEW)
    for call in made_far(plain):
        with use_backend("triton"), wrapping(), watched(*tensors_in(call.arguments)):
            if case == BY_PLAN:
                attend_by_plan(call)
            else:
                OPS[name](*call.arguments, **call.options)


@pytest.mark.parametrize("bounds", [(0, 1000, 1000, 1000), (-9, -9, 40, 3)])
def test_attention_stays_within_its_nodes(bounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expect, "readable", lambda value: False)
    call = sample("tree_attention", SIZES)
    arguments = (*call.arguments[:5], int32(bounds), *call.arguments[6:])
    with use_backend("triton"), watched():
        tree_attention(*arguments, **call.options)


def test_the_way_up_ends_at_the_root_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets that fall leave nodes that no launch has weighed, and so without a parent."""
    monkeypatch.setattr(expect, "readable", lambda value: False)
    call = drafted("traversal_verify", uniforms=torch.ones(SIZES.rows * SIZES.nodes))
    arguments = (call.arguments[0], int32([0, 4, 8, 1]), *call.arguments[2:])
    with use_backend("triton"), watched(*tensors_in(arguments)):
        path, _, _ = OPS["traversal_verify"](*arguments, **call.options)
    assert path[:, 0].tolist() == [0, 4, -1]


def test_what_is_watched_is_noticed() -> None:
    """A page table that is said to have more columns than it has."""
    from specdec_kernels.kv_slots.triton_kernel import place

    table, lengths, rows, offsets, depth, nodes, page = sample("kv_slots", SIZES).arguments
    own = [torch.zeros(size, dtype=kind) for size, kind in ((99, torch.int32), (3, torch.int32))]
    own += [torch.zeros(nodes, dtype=torch.int64) for _ in range(2)]
    sizes, kinds = (len(rows), nodes, *table.shape), {"PAGE": page, "ADVANCE": False, "TREE": True, "BLOCK": 16}
    with watched():
        place[(4,)](table, lengths, rows, offsets, depth, *own, *sizes, **kinds)
        with pytest.raises(Exception, match="reads memory of no tensor"):
            place[(4,)](table, lengths, rows, offsets, depth, *own, *sizes[:3], 9, **kinds)

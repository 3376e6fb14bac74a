"""Integers that the host does not check: launches touch only memory of their tensors, for any integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracles.interpreter import watched, wrapping
from oracles.launch_cases import CASES, NUMBERS, PARTS, SIZES, drafted, windowed
from torch import Tensor

from specdec_kernels import OPS, attention_plan, tree_attention, use_backend
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.testing.agreement import make_sample, map_tensors, tensors_in
from specdec_kernels.testing.samples_attention import Call, int32

SEEDS = range(3)
WILD = (-1000, -1, 13, 1000, 1000)
FAR = (2**31 - 1, 0, 2), (2**31 - 500, 1, 2), (-(2**31), 0, 1)
"""Numbers at the ends of 32 bits; which of a tensor is the first to be one, and how far they are apart."""
INTEGERS = (torch.int8, torch.int32, torch.int64)


def made_wild(call: Call, seed: int) -> Call:
    """Returns the call with most numbers of about half of its integer tensors changed."""
    g = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        wild = torch.tensor(WILD)[torch.randint(len(WILD), tensor.shape, generator=g)]
        share = 0.6 if float(torch.rand((), generator=g)) < 0.5 else 0.0
        if tensor.dtype not in INTEGERS:
            return tensor.clone()
        return torch.where(torch.rand(tensor.shape, generator=g) < share, wild.to(tensor.dtype), tensor)

    return map_tensors(call, change)


def test_all_launches_are_among_the_cases() -> None:
    known = {case.partition(" ")[0] for case in CASES} | NUMBERS | PARTS
    assert known == {name for name, op in OPS.items() if any(each.name == "triton" for each in op.backends)}


@pytest.mark.parametrize("case", CASES)
def test_no_integer_leads_outside_the_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
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
    from specdec_kernels.ops.tree_attention import launch

    monkeypatch.setattr(launch, "_num_processors", lambda device: 3)


def attend_by_plan(call: Call) -> None:
    query, keys, _, table, lengths, offsets, *_ = call.arguments
    from specdec_kernels.ops.tree_attention.launch import plan_numbers

    with use_backend("triton"), watched():
        plan = attention_plan(lengths, offsets, len(query), **plan_numbers(query, keys, table))
        tree_attention(*call.arguments, **call.options, plan=plan)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("few_programs")
def test_a_plan_of_wild_lengths_and_offsets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    attend_by_plan(made_wild(make_sample("tree_attention", SIZES), seed))


def made_far(call: Call) -> Iterator[Call]:
    """Yields the call with one integer tensor after the other changed."""

    def change(tensor: Tensor, wanted: Tensor, number: int, first: int, step: int) -> Tensor:
        changed = tensor.clone()
        if tensor is wanted:
            changed.view(-1)[first::step] = number
        return changed

    for wanted in [each for each in tensors_in(call.arguments) if each.dtype in INTEGERS]:
        for number, first, step in FAR:
            yield map_tensors(call, partial(change, wanted=wanted, number=number, first=first, step=step))


FEW = replace(SIZES, rows=2, layers=1)
BY_PLAN = "tree_attention by a plan"


@pytest.mark.parametrize("case", [BY_PLAN, *(each for each in CASES if each.startswith(("tree_attention", "kv_")))])
@pytest.mark.usefixtures("few_programs")
def test_nearly_too_large_numbers_stay_within_the_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They also cause no nearly endless loop."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    name = case.split(" ")[0]
    plain = windowed(FEW) if case.endswith("a window") else make_sample(name, FEW)
    for call in made_far(plain):
        with use_backend("triton"), wrapping(), watched(*tensors_in(call.arguments)):
            if case == BY_PLAN:
                attend_by_plan(call)
            else:
                OPS[name](*call.arguments, **call.options)


@pytest.mark.parametrize("bounds", [(0, 1000, 1000, 1000), (-9, -9, 40, 3)])
def test_attention_stays_within_its_nodes(bounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    call = make_sample("tree_attention", SIZES)
    arguments = (*call.arguments[:5], int32(bounds), *call.arguments[6:])
    with use_backend("triton"), watched():
        tree_attention(*arguments, **call.options)


def test_the_way_up_ends_at_the_root_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decreasing offsets leave nodes that no launch has processed, and so without a parent."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    call = drafted("traversal_verify", uniforms=torch.ones(SIZES.rows * SIZES.nodes))
    arguments = (call.arguments[0], int32([0, 4, 8, 1]), *call.arguments[2:])
    with use_backend("triton"), watched(*tensors_in(arguments)):
        path, _, _ = OPS["traversal_verify"](*arguments, **call.options)
    assert path[:, 0].tolist() == [0, 4, -1]


def test_accesses_outside_the_tensors_are_detected() -> None:
    """A page table that claims more columns than it has."""
    from specdec_kernels.ops.kv_slots.triton_kernel import assign_slots

    table, lengths, rows, offsets, depth, nodes, page = make_sample("kv_slots", SIZES).arguments
    own = [torch.zeros(size, dtype=kind) for size, kind in ((99, torch.int32), (3, torch.int32))]
    own += [torch.zeros(nodes, dtype=torch.int64) for _ in range(2)]
    sizes, kinds = (len(rows), nodes, *table.shape), {"PAGE_SIZE": page, "ADVANCE": False, "TREE": True, "BLOCK": 16}
    with watched():
        assign_slots[(4,)](table, lengths, rows, offsets, depth, *own, *sizes, **kinds)
        with pytest.raises(Exception, match="reads memory of no tensor"):
            assign_slots[(4,)](table, lengths, rows, offsets, depth, *own, *sizes[:3], 9, **kinds)

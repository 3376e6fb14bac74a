"""replay_verify in Triton: path and tokens of the reference, its statistics on the paths, its marks elsewhere."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded_case
from oracles.replay_cases import walks
from torch import Tensor

from specdec_kernels import distribution_stats, replay_sample, replay_verify, tree_plan, use_backend
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.ops.replay_verify import launch

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Checks equality; lse and mass are close only."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        loose = 1e-5 if place in (4, 7) else 0.0
        torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(walks(HALF_AND_SINGLE, (2, 33, 1025)), st.sampled_from([2, 4, 64]))
def test_kernel_equals_reference(case: dict[str, Any], tile: int) -> None:
    with use_backend("reference"):
        want = replay_verify(**case)
    with use_backend("triton"), patch.object(launch, "TILE", tile):
        same(replay_verify(**guarded_case(case)), want)


@pytest.mark.parametrize("row_of_many", [0, 1])
def test_every_choice_of_a_long_row_has_its_own_noise(row_of_many: int) -> None:
    """A chain with side branches, longer than a tile. Every token is its parent's choice, so all are accepted."""
    long = [-1, 0, 0, *(place - 3 + place % 2 for place in range(3, 24))]
    parents = [[-1, 0, 0], long] if row_of_many else [long, [-1, 0, 0]]
    counts = [len(each) for each in parents]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    plan = tree_plan(torch.tensor([*parents[0], *parents[1], -1, -1], dtype=torch.int32), offsets)
    nodes = int(offsets[-1]) + 2
    one = torch.ones(nodes)
    logits, sampling = torch.randn(nodes, 50), (one, one.int() * 0, one, one * 0)
    seeds, roots = torch.tensor([5, -6]), torch.tensor([100, 7], dtype=torch.int32)
    row = plan.row.long().clamp(min=0)
    inv_t, _, cut, tie_id = distribution_stats(logits, *sampling)
    choice = replay_sample(logits, inv_t, cut, tie_id, seeds[row], roots[row] + plan.depth + 1)
    above = torch.tensor([*parents[0], *parents[1], 0, 0]).clamp(min=0) + offsets.long()[row]
    arguments = (choice[above], offsets, plan.first_child, plan.next_sibling, None, logits, sampling, seeds, roots)
    with use_backend("reference"):
        want = replay_verify(*arguments, max_depth=23)
    with use_backend("triton"), patch.object(launch, "TILE", 8):
        same(replay_verify(*arguments, max_depth=23), want)
    deepest = [int(plan.depth[start:stop].max()) for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
    assert want[1].tolist() == deepest and max(deepest) == 12


def test_no_request_gives_no_statistics() -> None:
    none, one = torch.zeros(2, dtype=torch.int32), torch.ones(2)
    links = (torch.zeros(2, dtype=torch.int64), none[:1], none - 1, none - 1, None)
    arguments = (*links, torch.randn(2, 3), (one, none, one, one * 0), links[0][:0], none[:0])
    with use_backend("reference"):
        want = replay_verify(*arguments, max_depth=1)
    with use_backend("triton"):
        same(replay_verify(*arguments, max_depth=1), want)


def test_invalid_links_end_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU links are not checked: back, to the node itself, into other rows and out of the batch."""
    monkeypatch.setattr(argument_checks, "can_read_values", lambda value: False)
    offsets, nodes, one = torch.tensor([0, 9, 9, 21], dtype=torch.int32), 25, torch.ones(25)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        wild = [torch.randint(-9, 34, (nodes,), generator=g).int() for _ in range(2)]
        for links in wild:
            links[torch.randint(0, nodes, (2,), generator=g)] = 2**31 - 1
            links[3], links[12] = 3, 12
        tokens = torch.randint(0, 2, (nodes,), generator=g)
        case = {
            "tokens": tokens, "offsets": offsets, "first_child": wild[0], "next_sibling": wild[1], "score_only": None,
            "logits": torch.randn(nodes, 2, generator=g), "sampling": (one, one.int() * 0, one, one * 0),
            "seeds": torch.arange(3), "root_positions": torch.zeros(3, dtype=torch.int32), "max_depth": 4,
        }  # fmt: skip
        with use_backend("triton"):
            path, accepted, token, *_ = replay_verify(**guarded_case(case))
        for row, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            own = path[row, : int(accepted[row]) + 1]
            assert bool((own[1:] > own[:-1]).all()) and bool(((own >= start) & (own < stop)).all()) == (start < stop)
        assert token.tolist()[1] == -1 and bool((token < 2).all())


def test_a_score_only_node_and_errors_that_are_named() -> None:
    none, one = torch.zeros(2, dtype=torch.int32), torch.ones(2)
    good: dict[str, Any] = {
        "tokens": torch.tensor([0, 1]), "offsets": torch.tensor([0, 2], dtype=torch.int32),
        "first_child": torch.tensor([1, -1], dtype=torch.int32), "next_sibling": none - 1, "score_only": None,
        "logits": torch.tensor([[0.0, 9.0], [9.0, 0.0]]), "sampling": (one * 0, none, one, one * 0),
        "seeds": torch.tensor([1]), "root_positions": none[:1], "max_depth": 1,
    }  # fmt: skip
    bad = (
        ({"max_depth": 0}, "longer than max_depth = 0"),
        ({"seeds": none}, "replay_verify: seeds has dtype"),
        ({"logits": torch.zeros(3, 2)}, "expected"),
        ({"first_child": torch.tensor([0, -1], dtype=torch.int32)}, "first_child"),
    )
    with use_backend("triton"):
        assert replay_verify(**good)[1].tolist() == [1]
        score_only = torch.tensor([False, True])
        assert replay_verify(**good | {"score_only": score_only})[1].tolist() == [0], (
            "a score-only node is never accepted"
        )
        for change, message in bad:
            with pytest.raises(ValueError, match=message):
                replay_verify(**(good | change))

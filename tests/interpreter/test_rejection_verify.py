"""rejection_verify in Triton: the reference's paths, counts and tokens for every draw, thresholds up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.chain_cases import INF, check_logits, compare_thresholds, dist, fixed, int32, verifications
from oracles.interpreter import guarded_case

from specdec_kernels import (
    UnsupportedError,
    distribution_stats,
    draft_sample,
    rejection_thresholds,
    rejection_verify,
    use_backend,
)

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(verifications(HALF_AND_SINGLE))
def test_kernel_equals_reference(case: dict[str, Any]) -> None:
    sampling = case.pop("sampling")
    with use_backend("reference"):
        want, limits = rejection_verify(**case, max_depth=6), rejection_thresholds(**fixed(case))
    with use_backend("triton"):
        got, got_limits = (
            rejection_verify(**guarded_case(case), max_depth=6),
            rejection_thresholds(**guarded_case(fixed(case))),
        )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    compare_thresholds(case, got_limits, limits)
    check_logits(case, sampling, ("triton",))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_long_chains_and_a_large_vocabulary(rule: str) -> None:
    """Depth 64, greedy rows between sampled ones, sampled and deterministic tokens, and 200,000 ids."""
    for depth, vocab, rows in ((64, 12, 3), (3, 200_001, 2)):
        count = rows * (depth + 1)
        level = torch.randn(count, vocab)
        q_level = (level + 0.2 * torch.randn(count, vocab)).bfloat16()
        heat = torch.ones(count)
        heat[: depth + 1] = 0.0
        zero, order = torch.zeros(count, dtype=torch.int32), torch.arange(count)
        *target, mass = distribution_stats(level, heat, zero, torch.ones(count), torch.zeros(count), masses=True)
        draft = dist(q_level)
        tokens = draft_sample(*draft, order, zero, zero).roll(1)
        tokens[1 : depth + 1] = level[:depth].argmax(1)
        kinds = (order % 5 > 0).to(torch.int8)
        case: dict[str, Any] = {
            "tokens": tokens,
            "offsets": torch.arange(0, count + 1, depth + 1, dtype=torch.int32),
            "proposal_kinds": kinds,
            "dist_index": (order - 1).clamp(min=0).int(),
            "target": (level, *target),
            "draft": draft,
            "token_ids": None,
            "seeds": torch.arange(rows) * 7,
            "root_positions": int32([11] * rows),
            "max_depth": depth,
            "rule": rule,
        }
        with use_backend("reference"):
            want = rejection_verify(**case)
        with use_backend("triton"):
            got, with_mass = rejection_verify(**case), rejection_verify(**case, mass=mass)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, with_mass, strict=True))
        assert depth < 64 or int(want[1].max()) > 5


def test_empty_residuals_fall_back_to_the_target() -> None:
    """q covers p except for rounding. The uniform rejects, which exact arithmetic excludes, and the token is sampled
    from the target's distribution.
    """
    level = torch.randn(2, 3000)
    target = dist(level)
    chain = (torch.tensor([0, 5]), int32([0, 2]), torch.ones(2, dtype=torch.int8), int32([0, 0]), target)
    keys = (torch.tensor([3]), int32([4]), torch.tensor([0.5, 1.0]))
    with use_backend("reference"):
        want = rejection_verify(*chain, target, None, *keys, max_depth=1)
    with use_backend("triton"):
        got = rejection_verify(*chain, target, None, *keys, max_depth=1)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and got[1].item() == 0


def test_a_token_of_probability_zero_is_never_accepted() -> None:
    target = dist(torch.tensor([[0.0, -INF], [0.0, 0.0]]))
    chain = (torch.tensor([0, 1]), int32([0, 2]), torch.zeros(2, dtype=torch.int8), int32([-1, -1]), target, None, None)
    with use_backend("triton"):
        _, accepted, token = rejection_verify(*chain, torch.tensor([1]), int32([3]), torch.zeros(2), max_depth=1)
    assert accepted.tolist() == [0] and token.tolist() == [0]


def test_double_precision_is_refused_with_a_reason() -> None:
    target = dist(torch.zeros(1, 3, dtype=torch.float64))
    chain = (torch.tensor([0]), int32([0, 1]), torch.zeros(1, dtype=torch.int8), int32([-1]), target, None, None)
    with use_backend("triton"), pytest.raises(UnsupportedError, match="float64"):
        rejection_verify(*chain, torch.tensor([1]), int32([3]), max_depth=1)

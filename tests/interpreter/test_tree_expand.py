"""tree_expand in Triton against the reference: the same children in the same order, in guarded memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import guarded, guarded_case

from specdec_kernels import UnsupportedError, distribution_stats, tree_expand, use_backend

pytest.importorskip("triton")
launch = import_module("specdec_kernels.ops.tree_expand.launch")


def case(seed: int, counts: list[int], vocab: int, dtype: torch.dtype, noisy: bool) -> dict[str, Any]:
    """Returns trees with these numbers of nodes: all kinds of distributions, dead parents, forbidden tokens, two equal
    rows.
    """
    g = torch.Generator().manual_seed(seed)
    nodes = sum(counts)

    def pick(*choices: float) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (nodes,), generator=g)]

    logits = (torch.randn(nodes, vocab, generator=g) * 3).to(dtype)
    logits[torch.rand(nodes, vocab, generator=g) < 0.3] = -torch.inf
    if nodes > 2:
        logits[1] = logits[0]
        logits[2, vocab // 2] = torch.nan
    dists = distribution_stats(logits, pick(0, 0.5, 1, 1), pick(0, 0, 1, 40).int(), pick(1, 0.9), pick(0, 0.01))
    found = {
        "logits": guarded(logits, row_stride=vocab + 3) if nodes else logits,
        **{name: guarded(part) for name, part in zip(("inv_t", "cut", "tie_id"), (dists[0], *dists[2:]), strict=True)},
        "offsets": guarded(torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)),
        "scores": guarded(pick(0.0, -1.5, -3.25, -torch.inf)),
    }
    if noisy:
        found["seeds"] = guarded(torch.randint(-(2**63), 2**63 - 1, (nodes,), generator=g))
        found["positions"] = guarded(pick(-1, 0, 5, 2**31 - 129).int())
    return found


def both(given: dict[str, Any], **sizes: Any) -> None:
    results = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            results.append(tree_expand(**given, **sizes))
    (tokens, scores, best), (got_tokens, got_scores, got_best) = results
    assert torch.equal(got_tokens, tokens) and got_tokens.dtype == torch.int64
    torch.testing.assert_close(got_scores, scores, rtol=1e-6, atol=2e-6)
    assert torch.equal(got_best, best) and got_best.dtype == torch.int32


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    counts=st.lists(st.sampled_from([0, 1, 4]), min_size=1, max_size=3),
    vocab=st.sampled_from([1, 40, 4096, 4097, 9001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    width=st.sampled_from([1, 3, 10]),
    keep=st.sampled_from([1, 5, 33]),
    sharpness=st.sampled_from([1.0, 1.7]),
    noisy=st.booleans(),
)
def test_children_equal_those_of_the_reference(
    seed: int, counts: list[int], vocab: int, dtype: torch.dtype, width: int, keep: int, sharpness: float, noisy: bool
) -> None:
    given = case(seed, counts, vocab, dtype, noisy)
    both(given, width=min(width, vocab), keep=keep, sharpness=sharpness)


def test_equal_values_go_to_the_lower_id_and_the_earlier_child() -> None:
    """Across pieces and nodes, with zeros of either sign."""
    logits = torch.full((3, 9000), -1.0)
    logits[:, [5, 4500, 8999]] = torch.tensor([-0.0, 0.0, -0.0])
    one, zero = torch.ones(3), torch.zeros(3)
    inv_t, _, cut, tie_id = distribution_stats(logits, one, zero.int(), one, zero)
    with use_backend("triton"):
        tokens, _, best = tree_expand(
            logits, inv_t, cut, tie_id, torch.tensor([0, 3], dtype=torch.int32), zero, width=4, keep=5
        )
    assert tokens.tolist() == [[5, 4500, 8999, 0]] * 3 and best.tolist() == [[0, 1, 2, 4, 5]]


def test_many_children_of_a_large_tree() -> None:
    both(case(3, [10], 300, torch.float32, True), width=64, keep=40)


def test_the_caller_s_memory() -> None:
    given = guarded_case(case(7, [3, 0, 2], 5000, torch.float32, False))
    with use_backend("triton"):
        size = tree_expand.workspace_size(**given, width=3, keep=4)
    workspace = guarded(torch.full((size,), 255, dtype=torch.uint8))
    out = torch.empty(5, 3, dtype=torch.int64), torch.empty(5, 3), torch.empty(3, 4, dtype=torch.int32)
    with use_backend("reference"):
        want = tree_expand(**given, width=3, keep=4)
    for backend in ("triton", "cpu", "reference"):
        for each in out:
            each.fill_(9)
        with use_backend(backend):
            found = tree_expand(**given, width=3, keep=4, out=out, workspace=workspace)
            assert all(a is b for a, b in zip(found, out, strict=True)) and torch.equal(out[0], want[0])
            assert torch.equal(out[2], want[2])
            with pytest.raises(ValueError, match=r"tree_expand: out\[2\] is"):
                tree_expand(**given, width=3, keep=5, out=out)
    with use_backend("triton"):
        with pytest.raises(ValueError, match=r"tree_expand: workspace is .*; tree_expand\.workspace_size"):
            tree_expand(**given, width=3, keep=4, workspace=workspace[16:])
        with pytest.raises(ValueError, match="tree_expand: workspace begins at an odd address"):
            tree_expand(**given, width=3, keep=4, workspace=torch.zeros(size + 16, dtype=torch.uint8)[1:])


def test_arguments_that_the_kernels_do_not_serve() -> None:
    given = case(1, [2], 9000, torch.float32, False)
    with use_backend("triton"):
        with pytest.raises(UnsupportedError, match="children out of 9000 tokens"):
            tree_expand(**given, width=8000, keep=1)
        with pytest.raises(ValueError, match="tree_expand: keep is 0"):
            tree_expand(**given, width=8, keep=0)

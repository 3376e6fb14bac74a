"""Triton kernels of tree_conv, state_commit and window_commit against references, in guarded memory."""

from __future__ import annotations

import random

import pytest
import torch
from oracles.interpreter import guarded
from oracles.recurrent_batches import DTYPES, EPSILON, GATES, Trees, int32, make_layer, make_trees
from torch import Tensor

from specdec_kernels import tree_conv, use_backend, window_commit

pytestmark = pytest.mark.usefixtures("on_triton")
CHANNELS, REACH = (1, 40, 130, 300), (4, 2, 3, 1)
"""Channels of one block, of a part of one and of several; inputs that a node reads."""


def make_inputs(seed: int, trees: Trees, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Inputs, weight, bias and windows; those of texts without tokens are NaN, so none may be read."""
    g = torch.Generator().manual_seed(seed)
    channels, reach = CHANNELS[seed % 4], REACH[(seed // 2) % 4]
    inputs = torch.randn((trees.nodes, channels), generator=g).to(dtype)
    weight, bias = torch.randn((channels, reach), generator=g), torch.randn(channels, generator=g).to(dtype)
    window = torch.randn((len(trees.rows) + 1, reach - 1, channels), generator=g).to(dtype)
    for row, length in zip(trees.rows, trees.lengths):
        if length == 0:
            window[row] = float("nan")
    return guarded(inputs), guarded(weight), guarded(bias) if seed % 3 else None, guarded(window)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolutions_against_float64(dtype: torch.dtype, activation: str | None) -> None:
    """Four products and an exponential err by a few roundings of values that do not exceed the sum of magnitudes."""
    for seed in range(8):
        trees = make_trees(seed, 20)
        parts = make_inputs(seed, trees, dtype)
        before = parts[3].clone()
        where = (*map(guarded, trees.tensors), guarded(int32(trees.parents)))
        got = tree_conv(*parts, *where, activation)
        with use_backend("reference"):
            exact = [None if each is None else each.double() for each in parts]
            want = tree_conv(*exact, *where, activation)  # type: ignore[arg-type]
        rounding = EPSILON[dtype] if dtype != torch.float32 else 0.0
        torch.testing.assert_close(got.double(), want, rtol=1e-6 + rounding, atol=3e-6)
        assert got.dtype == dtype and not got[trees.offsets[-1] :].any()
        assert torch.equal(parts[3].nan_to_num(7), before.nan_to_num(7)), "without advance nothing is written"


def test_a_convolved_tree_has_the_bits_of_one_node_at_a_time() -> None:
    """Windows that follow by `advance` and by `window_commit` are equal, too."""
    for seed in range(6):
        trees, draw = make_trees(seed), random.Random(seed)
        inputs, weight, bias, window = make_inputs(seed, trees, DTYPES[seed % 3])
        outputs = tree_conv(inputs, weight, bias, window, *trees.tensors, int32(trees.parents), "silu")
        for request, (start, count) in enumerate(zip(trees.offsets, trees.counts)):
            if not count:
                continue
            path = trees.path_to(request, draw.randrange(count))
            row, length = trees.rows[request], trees.lengths[request]
            own = window.clone()
            for at, node in enumerate(path):
                where = (int32([row]), int32([length if at == 0 else 1]), int32([0, 1]))
                found = tree_conv(inputs[node : node + 1], weight, bias, own, *where, None, "silu", True)
                assert torch.equal(found[0], outputs[node]), seed
            moved = window.clone()
            window_commit(moved, inputs, int32([row]), int32([length]), int32(path)[None])
            assert torch.equal(moved.nan_to_num(7), own.nan_to_num(7)), (seed, start)


@pytest.mark.parametrize("requests", [1, 33, 70])
def test_prompts_of_many_requests_advance(requests: int) -> None:
    """More requests than nodes are compared with at a time; some have no node, some fewer than a window holds."""
    draw = random.Random(requests)
    counts = [draw.choice([0, 1, 2, 5, 9]) for _ in range(requests)]
    lengths, rows = [draw.choice([0, 5]) for _ in counts], draw.sample(range(requests + 1), requests)
    trees = Trees(counts, [], lengths, rows, 2)
    inputs, window = torch.randn(trees.nodes, 5), torch.randn(requests + 1, 3, 5)
    weight, want_window = torch.randn(5, 4), window.clone()
    got = tree_conv(inputs, weight, None, window, *trees.tensors, advance=True)
    with use_backend("reference"):
        want = tree_conv(inputs, weight, None, want_window, *trees.tensors, advance=True)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=3e-6)
    assert torch.equal(window, want_window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_windows_move(dtype: torch.dtype) -> None:
    inputs = guarded(torch.arange(20.0).view(10, 2).to(dtype))
    window = guarded(-torch.arange(24.0).view(4, 3, 2).to(dtype))
    before = window.clone()
    path = guarded(int32([4, 5, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, 9, 7, -1, -1, -1, -1]).view(4, 5))
    window_commit(window, inputs, int32([2, 0, 3, 1]), int32([5, 5, 5, 0]), path)
    assert torch.equal(window[0], before[0])
    assert torch.equal(window[1], torch.stack([inputs[0] * 0, inputs[0] * 0, inputs[7]]))
    assert torch.equal(window[2], torch.stack([before[2, 2], inputs[4], inputs[5]]))
    assert torch.equal(window[3], inputs[[2, 3, 9]])


def test_paths_longer_than_are_read_at_a_time() -> None:
    """A path of 70 nodes with gaps, and windows in rows that lie apart."""
    path = torch.arange(70, dtype=torch.int32).view(1, 70)
    path[0, 5:9] = path[0, 40] = path[0, 68] = -1
    inputs, both = torch.randn(70, 6), torch.randn(2, 2, 3, 6)
    want = both[:, 0].contiguous()
    window_commit(both[:, 0], inputs, int32([1]), int32([9]), path)
    with use_backend("reference"):
        window_commit(want, inputs, int32([1]), int32([9]), path)
    assert torch.equal(both[:, 0], want) and torch.equal(want[1], inputs[[66, 67, 69]])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_follow_the_recurrence(gate: str, dtype: torch.dtype) -> None:
    """Paths with and without nodes, of texts with and without tokens, against float64."""
    trees = Trees([4, 3, 2], [-1] * 9, [5, 0, 5], [3, 1, 0], 1)
    layer = make_layer(4, trees, gate, False, 4, 2, 16, 24, dtype)
    path = guarded(int32([0, 2, 3, 5, 4, -1, -1, -1, -1]).view(3, 3))
    got, exact = guarded(layer.state), layer.in_double()
    layer.commit(got, layer.value, *trees.tensors[:2], path)
    with use_backend("reference"):
        exact.commit(exact.state, exact.value, *trees.tensors[:2], path)
    torch.testing.assert_close(got.double(), exact.state, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(got[0], layer.state[0]) and torch.equal(got[2], layer.state[2])

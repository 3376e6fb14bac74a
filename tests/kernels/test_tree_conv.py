"""tree_conv: every backend against float64, and the bits of a node whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles.recurrent_batches import DTYPES, EPSILON, Trees, int32, make_trees, served, threads
from torch import Tensor

from specdec_kernels import tree_conv, use_backend, window_commit

BACKENDS = [each.name for each in tree_conv.backends if "triton" not in each.name]  # see tests/interpreter
CHANNELS, REACH = (1, 7, 16, 24, 40, 64, 130), (4, 2, 3, 1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if not served(tree_conv, request.param):
        pytest.skip(f"backend {request.param} is not available here")
    with use_backend(request.param):
        yield request.param


def make_inputs(seed: int, trees: Trees, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Inputs, weight, bias and windows; those of texts without tokens are NaN, so none may be read."""
    g = torch.Generator().manual_seed(seed)
    channels, reach = CHANNELS[seed % len(CHANNELS)], REACH[seed % len(REACH)]
    inputs = torch.randn((trees.nodes, channels), generator=g).to(dtype)
    weight, bias = torch.randn((channels, reach), generator=g), torch.randn(channels, generator=g).to(dtype)
    window = torch.randn((len(trees.rows) + 1, reach - 1, channels), generator=g).to(dtype)
    for row, length in zip(trees.rows, trees.lengths):
        if length == 0:
            window[row] = float("nan")
    return inputs, weight, bias if seed % 3 else None, window


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(backend: str, dtype: torch.dtype, activation: str | None) -> None:
    """Four products and an exponential err by a few roundings of values that do not exceed the sum of magnitudes."""
    for seed in range(2 * len(CHANNELS)):
        trees = make_trees(seed)
        where = (*trees.tensors, int32(trees.parents))
        parts = make_inputs(seed, trees, dtype)
        got = tree_conv(*parts, *where, activation)
        with use_backend("reference"):
            exact = [None if each is None else each.double() for each in parts]
            want = tree_conv(*exact, *where, activation)  # type: ignore[arg-type]
        rounding = EPSILON[dtype] if dtype != torch.float32 else 0.0
        torch.testing.assert_close(got.double(), want, rtol=1e-6 + rounding, atol=3e-6)
        assert got.dtype == dtype and not got[trees.offsets[-1] :].any()


def test_200_trees_have_the_bits_of_one_node_at_a_time(backend: str) -> None:
    for seed in range(200):
        trees, draw = make_trees(seed), random.Random(seed)
        inputs, weight, bias, window = make_inputs(seed, trees, DTYPES[seed % 3])
        with threads(1 + seed % 3):
            before = window.clone()
            outputs = tree_conv(inputs, weight, bias, window, *trees.tensors, int32(trees.parents), "silu")
        assert torch.equal(window.nan_to_num(7), before.nan_to_num(7))
        windows: dict[int, Tensor] = {}
        for request, (start, count) in enumerate(zip(trees.offsets, trees.counts)):
            for node in range(start, start + count):
                parent = trees.parents[node]
                own = (window[trees.rows[request]] if parent < 0 else windows[start + parent])[None].clone()
                at = (int32([0]), int32([trees.lengths[request] if parent < 0 else 1]), int32([0, 1]))
                out = tree_conv(inputs[node : node + 1], weight, bias, own, *at, None, "silu", True)
                assert torch.equal(out[0], outputs[node]), seed
                windows[node] = own[0]
            if count:
                path = trees.path_to(request, draw.randrange(count))
                rows, lengths = int32([trees.rows[request]]), int32([trees.lengths[request]])
                moved = window.clone()
                window_commit(moved, inputs, rows, lengths, int32(path)[None])
                assert torch.equal(moved[trees.rows[request]], windows[path[-1]]), seed


def test_a_prompt_has_the_same_bits_wherever_it_is_split(backend: str) -> None:
    nodes, where = 7, (int32([1]), int32([0]))
    for seed in range(len(CHANNELS)):
        trees = Trees([nodes], [-1] * nodes, [0], [1], 0)
        inputs, weight, bias, window = make_inputs(seed, trees, DTYPES[seed % 3])
        whole = window.clone()
        outputs = tree_conv(inputs, weight, bias, whole, *where, int32([0, nodes]), None, None, True)
        for split in range(1, nodes):
            own = window.clone()
            front = tree_conv(inputs[:split], weight, bias, own, *where, int32([0, split]), None, None, True)
            at = (int32([1]), int32([split]), int32([0, nodes - split]))
            back = tree_conv(inputs[split:], weight, bias, own, *at, None, None, True)
            assert torch.equal(torch.cat([front, back]), outputs)
            assert torch.equal(own.nan_to_num(7), whole.nan_to_num(7))


def call(**changes: Any) -> Tensor:
    given: dict[str, Any] = {
        "inputs": torch.zeros(3, 5), "weight": torch.zeros(5, 4), "bias": torch.zeros(5),
        "window": torch.zeros(2, 3, 5), "rows": int32([0]), "lengths": int32([1]), "offsets": int32([0, 3]),
        "parents": int32([-1, 0, 0]),
    }  # fmt: skip
    return tree_conv(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": torch.zeros(3, 4)}, r"inputs is \[3, 4\] and window \[2, 3, 5\]; expected \[M, C\] and"),
        ({"weight": torch.zeros(5, 3)}, r"weight is \[5, 3\]; expected \[5, 4\], and bias \[5\] or None"),
        ({"bias": torch.zeros(4)}, r"expected \[5, 4\], and bias \[5\] or None"),
        ({"activation": "relu"}, r"got activation 'relu'; expected None or 'silu'"),
        ({"rows": torch.tensor([0])}, r"rows is (torch\.)?int64 \[1\]; expected (contiguous )?int32 \[1\]"),
        ({"rows": int32([-1])}, r"got rows \[-1\]; expected row ids below 2"),
        ({"offsets": int32([1, 3])}, r"got offsets \[1, 3\]; expected non-decreasing offsets from 0 up to 3"),
        ({"parents": int32([-1, 0, 2])}, r"the parent of node 2 is 2; expected -1 to 1"),
        ({"advance": True}, "got advance and parents; expected chains"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_misfits_are_refused(backend: str, changes: dict[str, Any], words: str) -> None:
    call()
    with pytest.raises(ValueError, match=rf"^tree_conv: .*{words}"):
        call(**changes)


def test_a_window_of_another_dtype_is_left_to_the_reference() -> None:
    tree_conv.clear_choices()
    with pytest.warns(UserWarning, match="this kernel needs one dtype"):
        call(window=torch.zeros(2, 3, 5, dtype=torch.bfloat16))
    assert tree_conv.last_backend == "reference"

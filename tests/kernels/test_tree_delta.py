"""tree_delta: every backend against float64, and the bits of a node whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.recurrent_batches import (
    DTYPES,
    HEADS,
    KEYS,
    WIDTHS,
    check_against_float64,
    check_bits,
    check_empty_rows,
    check_prompts,
    int32,
    make_layer,
    make_trees,
    served,
)

from specdec_kernels import tree_delta, use_backend

BACKENDS = [each.name for each in tree_delta.backends if "triton" not in each.name]  # see tests/interpreter
GATES = ("head", "channel")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if not served(tree_delta, request.param):
        pytest.skip(f"backend {request.param} is not available here")
    with use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(backend: str, gate: str, dtype: torch.dtype) -> None:
    for seed, width in enumerate(WIDTHS):
        trees = make_trees(seed)
        layer = make_layer(seed, trees, gate, True, *HEADS[seed % len(HEADS)], KEYS[seed % 3], width, dtype)
        check_against_float64(layer, trees)


def test_200_trees_have_the_bits_of_one_node_at_a_time(backend: str) -> None:
    for seed in range(200 if backend == "cpu" else 12):
        check_bits(seed, GATES[seed % 2], delta=True)


@pytest.mark.parametrize("gate", GATES)
def test_a_prompt_has_the_same_bits_wherever_it_is_split(backend: str, gate: str) -> None:
    check_prompts(gate, delta=True)


@pytest.mark.parametrize("gate", GATES)
def test_a_prompt_of_no_token_changes_no_state(backend: str, gate: str) -> None:
    check_empty_rows(gate, delta=True)


def test_float64_is_left_to_the_reference() -> None:
    trees = make_trees(3)
    layer = make_layer(3, trees, "head", True).in_double()
    with pytest.warns(UserWarning, match="state is torch.float64; this kernel computes in float32"):
        tree_delta.clear_choices()
        layer.run(layer.state, *trees.tensors, int32(trees.parents))
    assert tree_delta.last_backend == "reference"


def call(**changes: Any) -> Any:
    trees = replace(make_trees(3), counts=[2, 1], parents=[-1, 0, -1], lengths=[5, 0], rows=[1, 0], tail=0)
    layer = make_layer(3, trees, "head", True)
    rows, lengths, offsets = trees.tensors
    given: dict[str, Any] = {
        "query": layer.query, "key": layer.key, "value": layer.value, "log_gate": layer.gate, "beta": layer.beta,
        "state": layer.state, "rows": rows, "lengths": lengths, "offsets": offsets, "parents": int32(trees.parents),
    }  # fmt: skip
    return tree_delta(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(3, 2, 8)}, r"query is \[3, 2, 8\]"),
        ({"key": torch.zeros(3, 3, 16)}, r"key is \[3, 3, 16\]; expected \[3, G, 16\], where G divides 4 heads"),
        ({"value": torch.zeros(3, 4, 15)}, r"value is \[3, 4, 15\]; expected \[3, 4, 16\]"),
        ({"log_gate": torch.zeros(3, 5)}, r"log_gate is \[3, 5\]; expected \[3, 4\] or \[3, 4, 16\]"),
        ({"beta": torch.zeros(2, 4)}, r"beta \[2, 4\]"),
        ({"state": torch.zeros(3, 4, 16)}, r"state is .*; expected float32 \[R, H, K, V\]"),
        ({"rows": int32([1, 3])}, r"got rows \[1, 3\]; expected row ids below 3"),
        ({"rows": torch.tensor([1, 0])}, r"rows is .*; expected .*int32 \[2\]"),
        ({"lengths": int32([1])}, r"lengths is .*; expected .*int32 \[2\]"),
        ({"offsets": int32([0, 3, 2])}, r"got offsets \[0, 3, 2\]; expected non-decreasing offsets from 0 up to 3"),
        ({"offsets": int32([0, 2, 4])}, r"got offsets \[0, 2, 4\]; expected non-decreasing"),
        ({"parents": int32([-1, 1, -1])}, r"the parent of node 1 is 1; expected -1 to 0"),
        ({"parents": int32([-1])}, r"parents is .*; expected int32 \[3\] or None"),
        ({"advance": True}, "got advance and parents; expected chains"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_misfits_are_refused(backend: str, changes: dict[str, Any], words: str) -> None:
    call()
    with pytest.raises(ValueError, match=rf"^tree_delta: .*{words}"):
        call(**changes)

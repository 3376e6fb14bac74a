"""tree_ssm: every backend against float64, and the bits of a node whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles.recurrent_batches import (
    DTYPES,
    GATES,
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

from specdec_kernels import tree_ssm, use_backend

BACKENDS = [each.name for each in tree_ssm.backends if "triton" not in each.name]  # see tests/interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if not served(tree_ssm, request.param):
        pytest.skip(f"backend {request.param} is not available here")
    with use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(backend: str, gate: str, dtype: torch.dtype) -> None:
    for seed, width in enumerate(WIDTHS):
        trees = make_trees(seed)
        layer = make_layer(seed, trees, gate, False, *HEADS[seed % len(HEADS)], KEYS[seed % 3], width, dtype)
        check_against_float64(layer, trees)


def test_200_trees_have_the_bits_of_one_node_at_a_time(backend: str) -> None:
    for seed in range(200 if backend == "cpu" else 12):
        check_bits(seed, GATES[seed % 3], delta=False)


@pytest.mark.parametrize("gate", GATES)
def test_a_prompt_has_the_same_bits_wherever_it_is_split(backend: str, gate: str) -> None:
    check_prompts(gate, delta=False)


@pytest.mark.parametrize("gate", GATES)
def test_a_prompt_of_no_token_changes_no_state(backend: str, gate: str) -> None:
    check_empty_rows(gate, delta=False)


def test_gates_of_any_size_have_their_exponentials(backend: str) -> None:
    """One key channel of 1 and a state of 1: the output is the gate."""
    logarithms = torch.tensor([0.0, -1e-3, -1.0, -20.0, -87.0, -90.0, -1e30, -torch.inf, 1.0, 80.0, 89.0, torch.nan])
    nodes = len(logarithms)
    one, none = torch.ones(nodes, 1, 1), torch.zeros(nodes, 1, 1)
    at = (int32([0] * nodes), int32([1] * nodes), int32(list(range(nodes + 1))))
    got = tree_ssm(one, none, none, logarithms[:, None], torch.ones(1, 1, 1, 1), *at)[:, 0, 0]
    torch.testing.assert_close(got, logarithms.exp(), rtol=5e-7, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(2, 1, 4)}, r"query is \[2, 1, 4\]; expected \[2, 1, 3\]"),
        ({"log_gate": torch.zeros(2, 1)}, r"log_gate is \[2, 1\]; expected \[2, 1, 5\]"),
        ({"decay": torch.zeros(1, 5, 3)}, r"decay is \[1, 5, 3\]; expected \[1, 3, 5\]"),
        ({"value": torch.zeros(2, 5)}, r"value is \[2, 5\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_misfits_are_refused(backend: str, changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "query": torch.zeros(2, 1, 3), "key": torch.zeros(2, 1, 3), "value": torch.zeros(2, 1, 5),
        "log_gate": torch.zeros(2, 1, 5), "state": torch.zeros(1, 1, 3, 5), "rows": int32([0]), "lengths": int32([1]),
        "offsets": int32([0, 2]), "decay": torch.zeros(1, 3, 5),
    }  # fmt: skip
    tree_ssm(**given)
    with pytest.raises(ValueError, match=rf"^tree_ssm: .*{words}"):
        tree_ssm(**(given | changes))

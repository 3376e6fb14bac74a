"""state_commit and window_commit: every backend against plain formulas, rows between others, and bad arguments.

tests/kernels/test_tree_delta.py, test_tree_ssm.py and test_tree_conv.py compare them with passes bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import oracles.recurrent_batches as batches
import pytest
import torch
from oracles.recurrent_batches import GATES, check_bits, int32, make_layer, make_trees, served, threads

from specdec_kernels import state_commit, use_backend, window_commit

BACKENDS = [each.name for each in state_commit.backends if "triton" not in each.name]  # see tests/interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if not served(state_commit, request.param):
        pytest.skip(f"backend {request.param} is not available here")
    with use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("gate", GATES)
def test_states_follow_the_recurrence(backend: str, gate: str) -> None:
    trees = make_trees(3)
    layer = make_layer(4, trees, gate, False, 4, 2, 16, 24)
    exact = layer.in_double()
    path = int32([[2, -1, 0, 1]])
    got, want = layer.state.clone(), exact.state[1]
    row = got[0].clone()
    layer.commit(got, layer.value, int32([1]), int32([9]), path)
    for node in (2, 0, 1):
        gates = exact.gate[node]
        if exact.decay is not None:
            factor = (gates[:, None, :] * exact.decay).exp()
        else:
            factor = gates.exp().reshape(4, -1, 1)
        keys = exact.key[node].repeat_interleave(2, 0)
        want = want * factor + keys[:, :, None] * exact.value[node][:, None, :]
    torch.testing.assert_close(got[1].double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[0].nan_to_num(7), row.nan_to_num(7))


def test_states_may_lie_apart(backend: str) -> None:
    """Rows of one tensor that holds the states of several layers."""
    trees = make_trees(3)
    layer = make_layer(5, trees, "head", True)
    both = torch.stack([layer.state, layer.state.clone()], 1)
    own, path = layer.state.clone(), int32([[0, 1]])
    for state in (both[:, 0], own):
        layer.commit(state, layer.value, int32([1]), int32([9]), path)
    assert torch.equal(both[:, 0].nan_to_num(7), own.nan_to_num(7))
    assert torch.equal(both[:, 1].nan_to_num(7), layer.state.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_windows_move(backend: str, dtype: torch.dtype) -> None:
    inputs = torch.arange(20.0).view(10, 2).to(dtype)
    window = -torch.arange(24.0).view(4, 3, 2).to(dtype)
    before = window.clone()
    path = int32([[4, 5, -1, -1, -1], [-1, -1, -1, -1, -1], [0, 1, 2, 3, 9], [7, -1, -1, -1, -1]])
    with threads(2):
        window_commit(window, inputs, int32([2, 0, 3, 1]), int32([5, 5, 5, 0]), path)
    assert torch.equal(window[0], before[0])
    assert torch.equal(window[1], torch.stack([inputs[0] * 0, inputs[0] * 0, inputs[7]]))
    assert torch.equal(window[2], torch.stack([before[2, 2], inputs[4], inputs[5]]))
    assert torch.equal(window[3], inputs[[2, 3, 9]])


def test_the_checks_of_bits_notice_trees_that_run_as_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_chains(*args: Any) -> Any:
        return batches_tree_delta(*args[:9], None, args[10])

    batches_tree_delta = batches.tree_delta
    monkeypatch.setattr(batches, "tree_delta", as_chains)
    with pytest.raises(AssertionError):
        for seed in range(5):
            check_bits(seed, "head", delta=True)


def test_the_checks_of_bits_notice_a_gate_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def ungated(state: Any, key: Any, value: Any, gate: Any, *rest: Any) -> None:
        own_commit(state, key, value, torch.zeros_like(gate), *rest)

    own_commit = batches.state_commit
    monkeypatch.setattr(batches, "state_commit", ungated)
    with pytest.raises(AssertionError):
        for seed in range(5):
            check_bits(seed, "head", delta=True)


STATE: dict[str, Any] = {
    "state": torch.zeros(2, 2, 3, 5), "key": torch.zeros(4, 1, 3), "value": torch.zeros(4, 2, 5),
    "log_gate": torch.zeros(4, 2), "rows": int32([0]), "lengths": int32([1]), "path": int32([[0, 3]]),
}  # fmt: skip
WINDOW: dict[str, Any] = {
    "window": torch.zeros(2, 3, 5), "inputs": torch.zeros(4, 5), "rows": int32([0]), "lengths": int32([1]),
    "path": int32([[0, 3]]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": int32([[0, 4]])}, r"got path .*; expected nodes below 4, padded with -1"),
        ({"path": int32([[-2, 3]])}, r"got path .*; expected nodes below 4, padded with -1"),
        ({"path": int32([0, 3])}, r"path is .*; expected .*int32 \[1, D \+ 1\]"),
        ({"rows": int32([2])}, r"got rows \[2\]; expected row ids below 2"),
        ({"lengths": int32([1, 2])}, r"lengths .*; expected .*int32"),
    ],
)
def test_misfits_are_refused(backend: str, changes: dict[str, Any], words: str) -> None:
    state_commit(**STATE)
    window_commit(**WINDOW)
    with pytest.raises(ValueError, match=rf"^state_commit: .*{words}"):
        state_commit(**(STATE | changes))
    with pytest.raises(ValueError, match=rf"^window_commit: .*{words}"):
        window_commit(**(WINDOW | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": torch.zeros(4, 4, 3)}, r"key is \[4, 4, 3\]; expected \[4, G, 3\]"),
        ({"log_gate": torch.zeros(4, 3)}, r"log_gate is \[4, 3\]; expected \[4, 2\] or \[4, 2, 3\]"),
        ({"decay": torch.zeros(2, 3, 5)}, r"log_gate is \[4, 2\]; expected \[4, 2, 5\]"),
    ],
)
def test_gates_and_keys_must_fit(backend: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"^state_commit: {words}"):
        state_commit(**(STATE | changes))


def test_windows_have_the_shape_and_dtype_of_inputs(backend: str) -> None:
    with pytest.raises(
        ValueError, match=r"^window_commit: inputs is \[4, 6\] and window \[2, 3, 5\]; expected \[M, C\]"
    ):
        window_commit(**(WINDOW | {"inputs": torch.zeros(4, 6)}))
    with pytest.raises(ValueError, match=r"^window_commit: inputs .*; expected"):
        window_commit(**(WINDOW | {"inputs": torch.zeros(4, 5, dtype=torch.bfloat16)}))

"""Faults in the Triton kernels of recurrent layers: each is found by the comparison with float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from oracles.recurrent_batches import Trees, check_against_float64, check_extreme_gates, int32, make_layer

from specdec_kernels import tree_conv, use_backend, window_commit

pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triangle, sequence, windows, commit, conv = (
    import_module(f"specdec_kernels.ops.{name}")
    for name in ("_recurrence.triton_triangle", "_recurrence.triton_sequence", "_recurrence.triton_windows",
                 "state_commit.triton_kernel", "tree_conv.triton_kernel")
)  # fmt: skip
BUSHY = [-1, 0, 0, 1, 2, 1, 3, 0]
SMALL = Trees([8, 0, 3], [*BUSHY, -1, 0, 0], [5, 5, 0], [2, 0, 1], 1)
LARGE = Trees([20], [-1, *range(18), 2], [5], [1], 0)
"""A tree of two tiles."""


def recurrences(form: str, gate: str = "head", trees: Trees = SMALL) -> None:
    padded = Trees(trees.counts, [*trees.parents, *[0] * trees.tail], trees.lengths, trees.rows, trees.tail)
    with use_backend("triton", tree_delta=form, tree_ssm=form):
        for delta in (True, False):
            check_against_float64(make_layer(3, padded, gate, delta, 2, 1, 32, 16), padded)


def in_triangles(gate: str = "head", trees: Trees = SMALL) -> Callable[[], None]:
    return lambda: recurrences("triton", gate, trees)


def in_sequence() -> None:
    recurrences("triton_sequence")


def extreme_gates() -> None:
    with use_backend("triton"):
        for delta in (True, False):
            check_extreme_gates("head", delta, 20)


def prompts() -> None:
    """A prompt of two tiles."""
    trees = Trees([20], [-1] * 20, [5], [1], 0)
    layer = make_layer(3, trees, "head", True, 2, 1, 32, 16)
    exact = layer.in_double()
    with use_backend("triton"):
        found, _ = layer.run(layer.state, *trees.tensors, advance=True)
    with use_backend("reference"):
        want, _ = exact.run(exact.state, *trees.tensors, advance=True)
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(layer.state.double(), exact.state, rtol=2e-5, atol=2e-5)


def commits() -> None:
    layer = make_layer(3, Trees([8], BUSHY, [5], [1], 0), "head", False, 2, 1, 16, 16)
    exact = layer.in_double()
    where = (int32([1]), int32([5]), int32([0, 2, 4, -1])[None])
    with use_backend("triton"):
        layer.commit(layer.state, layer.value, *where)
    with use_backend("reference"):
        exact.commit(exact.state, exact.value, *where)
    torch.testing.assert_close(layer.state.double(), exact.state, rtol=1e-6, atol=1e-6)


def convolutions() -> None:
    """Trees, and windows after a path and after a prompt."""
    torch.manual_seed(1)
    inputs, window, weight = torch.randn(12, 6), torch.randn(3, 3, 6), torch.randn(6, 4)
    results = []
    for backend in ("reference", "triton"):
        moved, advanced = window.clone(), window.clone()
        with use_backend(backend):
            found = tree_conv(inputs, weight, None, window, *SMALL.tensors, int32([*SMALL.parents, 0]))
            window_commit(moved, inputs, int32([1]), int32([5]), int32([0, 2, -1])[None])
            prompt = tree_conv(inputs, weight, None, advanced, int32([1]), int32([5]), int32([0, 2]), advance=True)
        results.append((found, moved, advanced, prompt))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def as_chains(trees: Any, first: Any, node: Any, wanted: Any, TREE: Any) -> Any:
    return node - 1


def own_tile_alone(sound: Any) -> Any:
    """Ancestors in earlier tiles are forgotten."""

    def climb(layer: Any, trees: Any, shape: Any, first: Any, node: Any, known: Any, begin: Any, *rest: Any) -> Any:
        decay, factor = sound(layer, trees, shape, first, node, known, begin, *rest)
        return tl.where((node < begin + 16)[:, None], decay, 0.0), factor

    return climb


def with_its_own_gate(sound: Any) -> Any:
    """The way from an ancestor begins with the gate of that ancestor, not behind it."""

    def climb(
        layer: Any, trees: Any, shape: Any, first: Any, node: Any, known: Any, begin: Any, head: Any, N: Any
    ) -> Any:
        decay, factor = sound(layer, trees, shape, first, node, known, begin, head, N)
        lane = begin + tl.arange(0, 16)
        return decay * triangle.load_gates(layer, shape, first, lane, lane <= tl.max(node, 0), head, lane)[
            None, :
        ], factor

    return climb


def without_the_state(sound: Any) -> Any:
    """The factors from the state are 0, those between nodes stay."""

    def climb(*args: Any) -> Any:
        decay, factor = sound(*args)
        return decay, factor * 0.0

    return climb


def without_gates(sound: Any) -> Any:
    return lambda *args: sound(*args) * 0.0 + 1.0


def of_any_text(sound: Any) -> Any:
    """The states of texts without tokens are read."""

    def locate(trees: Any, request: Any) -> Any:
        *found, written = sound(trees, request)
        return (*found, written | True)

    return locate


def from_the_start(sound: Any) -> Any:
    """A node that does not follow its parent continues the committed state."""
    return lambda layer, trees, shape, state, *rest: state


def without_replayed_gates(sound: Any) -> Any:
    return lambda layer, shape, state, *rest: state


def one_input_less(sound: Any) -> Any:
    return lambda window, inputs, node, kept, *rest: sound(window, inputs, node, kept - 1, *rest)


def in_the_next_request(sound: Any) -> Any:
    return lambda offsets, node, requests: sound(offsets, node + 1, requests)


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[], None]]] = {
    "trees that run as chains": (triangle, "parent_of", lambda sound: as_chains, in_triangles()),
    "trees that run as chains, gates of channels": (
        triangle, "parent_of", lambda sound: as_chains, in_triangles("channel"),
    ),
    "earlier tiles that are forgotten": (triangle, "climb", own_tile_alone, in_triangles(trees=LARGE)),
    "gates of ancestors that count": (triangle, "climb", with_its_own_gate, in_triangles()),
    "states that are lost at extreme gates": (triangle, "climb", without_the_state, extreme_gates),
    "gates that are lost": (triangle, "load_gates", without_gates, in_triangles()),
    "gates of channels that are lost": (triangle, "load_gates", without_gates, in_triangles("channel")),
    "states of empty texts": (triangle, "locate_request", of_any_text, in_triangles()),
    "a prompt whose state stays": (triangle, "advance_state", lambda sound: lambda *args: None, prompts),
    "trees that run as chains, in sequence": (sequence, "parent_of", lambda sound: as_chains, in_sequence),
    "branches from the committed state": (sequence, "replay_to", from_the_start, in_sequence),
    "states of empty texts, in sequence": (sequence, "locate_request", of_any_text, in_sequence),
    "a path that is not replayed": (commit, "follow_record", without_replayed_gates, commits),
    "a window of fewer inputs": (commit, "store_window", one_input_less, convolutions),
    "a window of fewer inputs after a prompt": (conv, "store_window", one_input_less, convolutions),
    "inputs of the next request": (conv, "find_requests", in_the_next_request, convolutions),
}  # fmt: skip


@pytest.mark.parametrize("check", sorted({each[3] for each in MUTANTS.values()}, key=lambda each: each.__name__))
def test_the_check_passes_without_a_fault(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, plant, check = MUTANTS[mutant]
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    with pytest.raises(AssertionError):
        check()

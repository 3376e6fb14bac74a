"""Triton kernels of recurrent layers against float64 references: both forms of the recurrences, ragged random trees.

Rows without nodes, texts without tokens, whose states are NaN, and trees of several tiles are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles.interpreter import guarded
from oracles.recurrent_batches import (
    DTYPES,
    GATES,
    HEADS,
    KEYS,
    WIDTHS,
    Layer,
    Trees,
    check_against_float64,
    check_bits,
    check_extreme_gates,
    int32,
    make_layer,
    make_trees,
)

from specdec_kernels import UnsupportedError, state_commit, tree_delta, tree_ssm, use_backend

RULES = [("tree_delta", "head"), ("tree_delta", "channel"), *(("tree_ssm", gate) for gate in GATES)]
FORMS = ("triton", "triton_sequence")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Recurrences in one form, and all else on Triton."""
    with in_form(request.param):
        yield request.param


def in_form(name: str) -> Any:
    return use_backend("triton", tree_delta=name, tree_ssm=name)


def guarded_layer(layer: Layer) -> Layer:
    """The same numbers in memory that ends behind them."""
    parts = (layer.query, layer.key, layer.value, layer.gate, layer.beta, layer.decay, layer.state)
    return Layer(*[None if each is None else guarded(each) for each in parts])  # type: ignore[arg-type]


def case_of(seed: int, op: str, gate: str, most: int = 10, dtype: torch.dtype | None = None) -> tuple[Layer, Trees]:
    trees = make_trees(seed, most)
    sizes = (*HEADS[seed % 4], KEYS[seed % 3], WIDTHS[seed % 6])
    layer = make_layer(seed, trees, gate, op == "tree_delta", *sizes, dtype or DTYPES[seed % 3])
    return guarded_layer(layer), trees


@pytest.mark.parametrize(("op", "gate"), RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(form: str, op: str, gate: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        check_against_float64(*case_of(seed, op, gate, dtype=dtype))


@pytest.mark.parametrize(("op", "gate"), RULES)
def test_trees_of_several_tiles(op: str, gate: str) -> None:
    """Up to 40 nodes, and chains of 37, which are deeper than a tile."""
    with in_form("triton"):
        for seed in range(2):
            check_against_float64(*case_of(seed + 1, op, gate, most=40))
        chain = Trees([37, 0, 3], [*range(-1, 36), -1, 0, 1], [5, 5, 0], [2, 0, 1], 1)
        layer = make_layer(
            7, Trees(chain.counts, [*chain.parents, 0], chain.lengths, chain.rows, 1), gate, op == "tree_delta"
        )
        check_against_float64(layer, Trees(chain.counts, [*chain.parents, 0], chain.lengths, chain.rows, 1))
        outputs, _ = layer.run(layer.state.clone(), *chain.tensors)
        want, _ = layer.run(layer.state.clone(), *chain.tensors, int32([*chain.parents, 0]))
        torch.testing.assert_close(outputs, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "gate"), RULES)
def test_in_sequence_a_tree_has_the_bits_of_one_node_at_a_time(op: str, gate: str) -> None:
    """Commits included: a replayed path has the bits of the passes."""
    with in_form("triton_sequence"):
        for seed in range(3):
            check_bits(seed, gate, op == "tree_delta")


def test_gates_of_elements_run_in_sequence_by_default() -> None:
    with in_form("triton"):
        for seed in range(3, 5):
            check_bits(seed, "element", False)


@pytest.mark.parametrize(("op", "gate"), RULES)
def test_prompts_advance(form: str, op: str, gate: str) -> None:
    """Prompts in one piece and in two, with an empty row between, against the states of the reference."""
    counts = [35 if form == "triton" else 5, 0, 2]
    trees = Trees(counts, [-1] * sum(counts), [0, 5, 5], [2, 0, 3], 0)
    layer = make_layer(5, trees, gate, op == "tree_delta", 2, 1, 64, 24)
    exact = layer.in_double()
    want = exact.state.clone()
    with use_backend("reference"):
        outputs, _ = exact.run(want, *trees.tensors, advance=True)
    got = layer.state.clone()
    found, _ = layer.run(got, *trees.tensors, advance=True)
    torch.testing.assert_close(found.double(), outputs, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert torch.equal(got[0].nan_to_num(7), layer.state[0].nan_to_num(7)), "the row of no nodes"
    split, own = counts[0] // 2, layer.state.clone()
    layer.of(slice(0, split)).run(own, int32([2]), int32([0]), int32([0, split]), advance=True)
    rest = layer.of(slice(split, counts[0]))
    rest.run(own, int32([2]), int32([split]), int32([0, counts[0] - split]), advance=True)
    torch.testing.assert_close(own[2].double(), want[2], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("op", "gate"), RULES[:4])
def test_extreme_gates_neither_overflow_nor_cancel(form: str, op: str, gate: str) -> None:
    check_extreme_gates(gate, op == "tree_delta", 20 if form == "triton" else 9)


def test_gates_of_any_size_have_their_exponentials(form: str) -> None:
    logarithms = torch.tensor([0.0, -1e-3, -1.0, -20.0, -87.0, -1e30, -torch.inf, 1.0, 80.0, torch.nan])
    nodes = len(logarithms)
    one, none = torch.ones(nodes, 1, 1), torch.zeros(nodes, 1, 1)
    at = (int32([0] * nodes), int32([1] * nodes), int32([*range(nodes + 1)]))
    got = tree_ssm(one, none, none, logarithms[:, None], torch.ones(1, 1, 1, 1), *at)[:, 0, 0]
    torch.testing.assert_close(got, logarithms.exp(), rtol=5e-7, atol=1e-37, equal_nan=True)


def test_a_key_of_another_tree_is_never_read(form: str) -> None:
    """Nodes that are NaN stay alone: neighbours in a batch do not change a text."""
    trees = Trees([5, 4], [-1, 0, 0, 1, 2, -1, 0, 1, 0], [5, 5], [1, 0], 0)
    layer = make_layer(3, trees, "head", True, 2, 1, 16, 16)
    want, _ = layer.run(layer.state.clone(), *trees.tensors, int32(trees.parents))
    for part in (layer.query, layer.key, layer.value, layer.gate):
        part[5:] = float("nan")
    got, _ = layer.run(layer.state.clone(), *trees.tensors, int32(trees.parents))
    assert torch.equal(got[:5], want[:5]) and got[5:].isnan().all()


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_nothing_to_do(form: str, counts: list[int]) -> None:
    """No request, or none with a node: zeros for nodes of nobody, and no state changes."""
    trees = Trees(counts, [0, 0], [5] * len(counts), [*range(len(counts))], 2)
    for delta in (True, False):
        layer = make_layer(1, trees, "head", delta)
        state = layer.state.clone()
        for parents, advance in ((int32(trees.parents), False), (None, True)):
            outputs, added = layer.run(state, *trees.tensors, parents, advance)
            assert not outputs.any() and (not delta or not added.any()) and torch.equal(state, layer.state)
        layer.commit(state, added, *trees.tensors[:2], torch.full((len(counts), 3), -1, dtype=torch.int32))
        assert torch.equal(state, layer.state)


def test_no_nodes_at_all(form: str) -> None:
    trees = Trees([0, 0], [], [5, 0], [0, 1], 0)
    for delta in (True, False):
        layer = make_layer(1, trees, "head", delta)
        assert layer.run(layer.state, *trees.tensors)[0].shape == (0, 4, 16)


def test_rows_of_a_state_may_lie_apart_but_not_their_parts(form: str) -> None:
    layer, trees = case_of(3, "tree_delta", "head")
    apart = torch.stack([layer.state, layer.state.clone()], 1)
    where = (*trees.tensors, int32(trees.parents))
    want, got = layer.run(layer.state, *where), layer.run(apart[:, 0], *where)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    with pytest.raises(ValueError, match=r"^tree_delta: state .* has rows that are not contiguous; expected float32"):
        layer.run(layer.state.transpose(2, 3).contiguous().transpose(2, 3), *where)


def test_more_key_channels_than_a_program_holds_are_left_to_others() -> None:
    state, vectors, where = torch.zeros(1, 1, 513, 1), torch.zeros(1, 1, 513), (int32([0]), int32([1]))
    value, gate = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    with (
        use_backend("triton"),
        pytest.raises(UnsupportedError, match="513 key channels; this kernel holds at most 512"),
    ):
        tree_ssm(vectors, vectors, value, gate, state, *where, int32([0, 1]))
    with use_backend("triton"), pytest.raises(UnsupportedError, match="513 key channels"):
        state_commit(state, vectors, value, gate, *where, int32([[0]]))


@pytest.mark.parametrize("keys", [5, 96, 512])
def test_key_channels_of_any_number(form: str, keys: int) -> None:
    trees = Trees([4], [-1, 0, 0, 2], [5], [0], 0)
    check_against_float64(make_layer(1, trees, "head", True, 2, 2, keys, 20), trees)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(3, 2, 8)}, r"query is \[3, 2, 8\]"),
        ({"rows": int32([3])}, r"got rows \[3\]; expected row ids below 1"),
        ({"offsets": int32([0, 4])}, r"got offsets \[0, 4\]; expected non-decreasing"),
        ({"parents": int32([-1, 1, 0])}, r"the parent of node 1 is 1; expected -1 to 0"),
        ({"advance": True}, "got advance and parents; expected chains"),
    ],
)
def test_misfits_are_refused(form: str, changes: dict[str, Any], words: str) -> None:
    trees = Trees([3], [-1, 0, 0], [5], [0], 0)
    layer = make_layer(2, trees, "head", True, 4, 2, 16, 16)
    rows, lengths, offsets = trees.tensors
    given: dict[str, Any] = {
        "query": layer.query, "key": layer.key, "value": layer.value, "log_gate": layer.gate, "beta": layer.beta,
        "state": layer.state[:1], "rows": rows, "lengths": lengths, "offsets": offsets, "parents": int32(trees.parents),
    }  # fmt: skip
    tree_delta(**given)
    with pytest.raises(ValueError, match=rf"^tree_delta: .*{words}"):
        tree_delta(**(given | changes))

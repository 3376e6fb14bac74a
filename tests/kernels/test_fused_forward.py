"""fused_forward: every backend and instruction set against float64, batch invariance, and bad arguments."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.decoder_cases import ALL_OPTIONS, Pass, made, passes

from specdec_kernels import DecoderLayer, DecoderNumbers, DecoderTable, fused_forward, quantize_int8, use_backend
from specdec_kernels.ops.fused_forward.decoder_table import MATRICES, SCALES

ISAS = {"portable": 1, "avx2": 2, "avx512": 3}
BACKENDS = ["reference", *ISAS]
HERE = fused_forward.backends[0].missing()
needs_cpu = pytest.mark.skipif(HERE is not None, reason=HERE or "")
# What an error (root mean square, largest) may be above twice that of PyTorch's operators: a few roundings of values of
# size one, because the errors of few values are random, on either side.
FLOOR = 6e-7, 2e-6
ROWS = made(3, 4, 2, 16, 48, 40, 50, 2, 16, lengths=[0, 30, 5, 77], counts=[1, 6, 3, 9])
WITH_OPTIONS = made(3, 4, 2, 16, 48, 40, 50, 2, 16, lengths=[0, 30, 5, 77], counts=[1, 6, 3, 9], options=ALL_OPTIONS)


def run(backend: str, table: DecoderTable, nodes: tuple[Any, ...]) -> torch.Tensor:
    if backend == "reference":
        with use_backend("reference"):
            return fused_forward(table, *nodes)
    assert table.obstacle is None
    return torch.ops.specdec.fused_forward(table.addresses, *nodes, table.vocab_size, table.is_bfloat16, ISAS[backend])


def amplification(table: DecoderTable) -> float:
    """By how much an RMS norm can amplify a rounding error.

    Over a hidden state of one number, the norm is `x / sqrt(x^2 + eps)`: its slope at 0 is `1 / sqrt(eps)`.
    """
    return 1.0 if table.embedding.shape[1] > 1 else table.numbers.eps**-0.5


@needs_cpu
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(case=passes())
def test_against_float64(backend: str, case: Pass) -> None:
    exact, table = case.table(torch.float64), case.table(torch.float32)
    want = run("reference", exact, case.nodes)
    got = run(backend, table, case.nodes)
    assert got.shape == want.shape and got.dtype == torch.float32
    steep = 1e-5 * amplification(exact)  # torch's own float32 operators have errors of a few times this size
    torch.testing.assert_close(got.double(), want, rtol=steep, atol=4 * steep)
    for name in ("keys", "values"):
        for one, other in zip(getattr(table, name), getattr(exact, name)):
            torch.testing.assert_close(one.double(), other, rtol=steep, atol=4 * steep)


@needs_cpu
@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("case", [ROWS, WITH_OPTIONS], ids=["llama", "options"])
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(backend: str, case: Pass) -> None:
    tokens, positions, _, slots, page_table, lengths, offsets, ancestors, depth = case.nodes
    together = run(backend, case.table(torch.float32), case.nodes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(run(backend, case.table(torch.float32), case.nodes), together)
    finally:
        torch.set_num_threads(threads)
    for row in range(4):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        part = slice(begin, end)
        own = tokens[part], positions[part], None, slots[part], page_table[row : row + 1], lengths[row : row + 1]
        trees = torch.tensor([0, end - begin], dtype=torch.int32), ancestors[part], depth[part]
        assert torch.equal(run(backend, case.table(torch.float32), (*own, *trees)), together[part])


@needs_cpu
@pytest.mark.parametrize("by_output", [False, True])
def test_bfloat16_is_as_exact_as_torch_and_has_the_same_bits_in_any_batch(by_output: bool) -> None:
    tokens, positions, _, slots, page_table, lengths, offsets, ancestors, depth = WITH_OPTIONS.nodes

    def table() -> DecoderTable:
        made = WITH_OPTIONS.table(torch.bfloat16)
        if not by_output:
            return made
        layers = [
            replace(each, **{name: getattr(each, name).contiguous() for name in MATRICES}) for each in made.layers
        ]
        ends = made.norm, made.head, made.rotary, made.keys, made.values, made.numbers
        return DecoderTable(made.embedding, layers, *ends)

    def run_on(isa: int, nodes: tuple[Any, ...]) -> torch.Tensor:
        made = table()
        return torch.ops.specdec.fused_forward(made.addresses, *nodes, made.vocab_size, True, isa)

    exact = run("reference", WITH_OPTIONS.table(torch.float64), WITH_OPTIONS.nodes)
    own = errors(run("reference", table(), WITH_OPTIONS.nodes), exact, float(exact.std()))
    for isa in range(6):
        together = run_on(isa, WITH_OPTIONS.nodes)
        assert together.dtype == torch.bfloat16
        found = errors(together, exact, float(exact.std()))
        assert found[0] < 1.5 * own[0] and found[1] < 2 * own[1], (found, own)
        for row in range(4):
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            mine = tokens[part], positions[part], None, slots[part], page_table[row : row + 1], lengths[row : row + 1]
            trees = torch.tensor([0, part.stop - part.start], dtype=torch.int32), ancestors[part], depth[part]
            assert torch.equal(run_on(isa, (*mine, *trees)), together[part])


REST = [
    each.name for each in fields(DecoderLayer) if each.name not in (*MATRICES, *SCALES, "window", "rotary")
]  # norms and biases


def rounded(table: DecoderTable) -> tuple[DecoderTable, DecoderTable]:
    """The decoder with int8 matrices, and one in float64 with the values of these."""

    def whole(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return values.double() * scale.double()[:, None]

    int8, exact = [], []
    for layer in table.layers:
        parts = {name: quantize_int8(getattr(layer, name).contiguous()) for name in MATRICES}
        values = {name: weight for name, (weight, _) in parts.items()}
        int8.append(replace(layer, **values, **{f"{name}_scale": scale for name, (_, scale) in parts.items()}))
        rest = {name: getattr(layer, name) for name in REST if getattr(layer, name) is not None}
        wide = {name: each.double() for name, each in rest.items()}
        exact.append(replace(layer, **wide, **{name: whole(*pair) for name, pair in parts.items()}))
    head, scale = quantize_int8(table.head.contiguous())
    keys, cached = [each.clone() for each in table.keys], [each.clone() for each in table.values]
    made = DecoderTable(table.embedding, int8, table.norm, head, table.rotary, keys, cached, table.numbers, scale)
    ends = table.norm.double(), whole(head, scale), table.rotary.double()
    stored = [each.double() for each in table.keys], [each.double() for each in table.values]
    return made, DecoderTable(table.embedding.double(), exact, *ends, *stored, table.numbers)


@needs_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [ROWS, WITH_OPTIONS], ids=["llama", "options"])
def test_int8_matrices_give_the_logits_of_their_values(case: Pass, dtype: torch.dtype) -> None:
    """On every instruction set, with the same bits for rows alone."""
    tokens, positions, _, slots, page_table, lengths, offsets, ancestors, depth = case.nodes
    exact = run("reference", rounded(case.table(dtype))[1], case.nodes)
    own = errors(run("reference", rounded(case.table(dtype))[0], case.nodes), exact, float(exact.std()))
    for isa in range(6):

        def run_on(nodes: tuple[Any, ...], isa: int = isa) -> torch.Tensor:
            table = rounded(case.table(dtype))[0]
            assert table.obstacle is None
            half = dtype == torch.bfloat16
            return torch.ops.specdec.fused_forward(table.addresses, *nodes, table.vocab_size, half, isa)

        together = run_on(case.nodes)
        found = errors(together, exact, float(exact.std()))
        assert all(each < 2 * mine + floor for each, mine, floor in zip(found, own, FLOOR)), (isa, found, own)
        for row in range(4):
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            mine = tokens[part], positions[part], None, slots[part], page_table[row : row + 1], lengths[row : row + 1]
            trees = torch.tensor([0, part.stop - part.start], dtype=torch.int32), ancestors[part], depth[part]
            assert torch.equal(run_on((*mine, *trees)), together[part])


def test_int8_matrices_without_all_scales_are_refused() -> None:
    table = rounded(ROWS.table(torch.float32))[0]
    rest = table.rotary, table.keys, table.values, table.numbers
    with pytest.raises(ValueError, match="head has dtype"):
        DecoderTable(table.embedding, table.layers, table.norm, table.head, *rest)
    assert table.head_scale is not None
    bare = [replace(each, up_scale=None) for each in table.layers]
    with pytest.raises(ValueError, match="up_scale"):
        DecoderTable(table.embedding, bare, table.norm, table.head, *rest, table.head_scale)
    with pytest.raises(ValueError, match="head_scale has shape"):
        DecoderTable(table.embedding, table.layers, table.norm, table.head, *rest, table.head_scale[1:])
    floats = ROWS.table(torch.float32)
    scaled = [replace(each, up_scale=torch.ones(40)) for each in floats.layers]
    with pytest.raises(ValueError, match="up_scale is given without head_scale; expected all scales, or none"):
        DecoderTable(floats.embedding, scaled, floats.norm, floats.head, *rest)
    turned = [replace(each, down=each.down.t().contiguous().t()) for each in table.layers]
    other = DecoderTable(table.embedding, turned, table.norm, table.head, *rest, table.head_scale)
    assert "down has strides" in str(other.obstacle)


@needs_cpu
def test_wanted_nodes_come_in_their_order_and_may_repeat() -> None:
    wanted = torch.tensor([18, 0, 7, 7])
    nodes = (*ROWS.nodes[:2], wanted, *ROWS.nodes[3:])
    every = fused_forward(ROWS.table(torch.float32), *ROWS.nodes)
    assert torch.equal(fused_forward(ROWS.table(torch.float32), *nodes), every[wanted])


@needs_cpu
@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("wanted", [None, [18, 0, 7, 7], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("states", [[0], [3, 0, 1, 2, 1], [2], [1], []], ids=str)
def test_hidden_states_change_no_logits(backend: str, wanted: list[int] | None, states: list[int]) -> None:
    """They are those of the reference, of all nodes, and come in the order asked for."""
    chosen = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    nodes = (*WITH_OPTIONS.nodes[:2], chosen, *WITH_OPTIONS.nodes[3:])
    table = WITH_OPTIONS.table(torch.float32)
    sizes = table.vocab_size, table.embedding.shape[1], False, ISAS[backend]
    logits, hidden = torch.ops.specdec.fused_forward_states(
        table.addresses, *nodes, torch.tensor(states).long(), *sizes
    )
    assert torch.equal(logits, run(backend, WITH_OPTIONS.table(torch.float32), nodes))
    with use_backend("reference"):
        want: Any = fused_forward(WITH_OPTIONS.table(torch.float64), *nodes, states)
    torch.testing.assert_close(hidden.double(), want[1], rtol=1e-4, atol=1e-4)


@needs_cpu
@pytest.mark.parametrize("options", [(), ALL_OPTIONS], ids=["llama", "options"])
def test_step_by_step_is_all_at_once(options: tuple[str, ...]) -> None:
    """Tokens one by one attend to the stored keys, as one causal pass does: the same bits."""
    case = made(5, 2, 1, 32, 32, 48, 40, 2, 4, lengths=[0], counts=[20], causal=True, options=options)
    tokens, positions, _, slots, page_table, _, _, _, _ = case.nodes
    want, table, got = fused_forward(case.table(torch.float32), *case.nodes), case.table(torch.float32), []
    for at in range(20):
        one = slice(at, at + 1)
        length, offsets = torch.tensor([at], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        got.append(fused_forward(table, tokens[one], positions[one], None, slots[one], page_table, length, offsets))
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_every_option_changes_the_logits(option: str) -> None:
    """So the comparisons with float64 depend on it."""
    one, other = (
        made(3, 4, 2, 16, 48, 40, 50, 2, 16, lengths=[30], counts=[6], options=options) for options in ((), (option,))
    )
    other.weights |= {name: parts for name, parts in one.weights.items() if name != "rotary"}
    exact = [run("reference", each.table(torch.float64), each.nodes) for each in (one, other)]
    assert (exact[0] - exact[1]).abs().max() > 0.01


def test_a_copy_has_its_own_addresses() -> None:
    table = ROWS.table(torch.float32)
    twin = copy.deepcopy(table)
    assert twin.obstacle is None and not bool((twin.addresses[:3] == table.addresses[:3]).any())
    want = fused_forward(table, *ROWS.nodes)
    table.embedding.zero_()
    assert torch.equal(fused_forward(twin, *ROWS.nodes), want)
    assert torch.equal(twin.keys[0], table.keys[0])


def test_the_reference_serves_what_cpp_cannot() -> None:
    double = ROWS.table(torch.float64)
    rows = {row.backend: row for row in fused_forward.explain(double, *ROWS.nodes)}
    assert rows["reference"].chosen and "expected torch.float32" in str(rows["cpu"].reason)
    layers = [copy.copy(each) for each in ROWS.table(torch.float32).layers]
    by_output = replace(layers[0], **{name: getattr(layers[0], name).contiguous() for name in MATRICES})
    table = ROWS.table(torch.float32)
    ends = table.norm, table.head, table.rotary, table.keys, table.values, table.numbers
    other = DecoderTable(table.embedding, [by_output, layers[1]], *ends)
    assert "query has strides" in str(other.obstacle)
    torch.testing.assert_close(
        fused_forward(other, *ROWS.nodes), fused_forward(ROWS.table(torch.float32), *ROWS.nodes), rtol=1e-4, atol=1e-4
    )


WRONG: dict[str, tuple[int, Any, str]] = {
    "token beyond": (0, lambda old: old.index_fill(0, torch.tensor([2]), 50), "tokens has values"),
    "token below": (0, lambda old: old.index_fill(0, torch.tensor([2]), -1), "tokens has values"),
    "tokens int32": (0, lambda old: old.int(), "tokens has dtype"),
    "position beyond": (1, lambda old: old.index_fill(0, torch.tensor([2]), 87), "positions has values"),
    "positions short": (1, lambda old: old[:-1], "positions has shape"),
    "wanted beyond": (2, lambda old: torch.tensor([19]), "wanted has values"),
    "wanted below": (2, lambda old: torch.tensor([-1]), "wanted has values"),
    "slot beyond": (3, lambda old: old.index_fill(0, torch.tensor([2]), 10**6), "slots has values"),
    "pages": (4, lambda old: old.index_fill(1, torch.tensor([0]), 9999), "page"),
    "lengths": (5, lambda old: old + 1000, "slots"),
    "offsets": (6, lambda old: old + 1, "offsets"),
    "ancestors": (7, lambda old: old[:-1], "ancestors has shape"),
    "depth": (8, lambda old: old[:-1], "depth has shape"),
    "state beyond": (9, lambda old: [0, 4], r"states are \[0, 4\]; expected integers from 0 to 3"),
    "state below": (9, lambda old: [-1], r"states are \[-1\]; expected"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("backend", ["reference", None])
def test_bad_arguments(backend: str | None, wrong: str) -> None:
    at, change, words = WRONG[wrong]
    nodes: list[Any] = [*ROWS.nodes, None]
    nodes[at] = change(nodes[at])
    with use_backend(backend), pytest.raises(ValueError, match=words):
        fused_forward(ROWS.table(torch.float32), *nodes)


def test_weights_on_another_device_are_refused() -> None:
    table = ROWS.table(torch.float32)
    head = torch.empty(table.head.shape, device="meta")
    parts = [table.embedding, table.layers, table.norm, head, table.rotary, table.keys, table.values]
    other = DecoderTable(*parts, table.numbers)  # type: ignore[arg-type]
    assert other.obstacle == "a part of the decoder is on meta; expected all of it on cpu"
    wide = made(1, 1, 1, 514, 8, 8, 8, 1, 4, lengths=[0], counts=[1]).table(torch.float32)
    assert wide.obstacle == "heads are 514 wide; expected at most 512"


def test_a_list_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="decoder is list; expected a DecoderTable"):
        fused_forward([], *ROWS.nodes)


def test_weights_that_do_not_fit_are_refused() -> None:
    table = ROWS.table(torch.float32)
    parts: list[Any] = [table.embedding, table.layers, table.norm, table.head, table.rotary, table.keys, table.values]
    parts.append(table.numbers)

    def refused(at: int, value: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            DecoderTable(*parts[:at], value, *parts[at + 1 :])

    refused(0, table.embedding.long(), "embedding is no float tensor")
    refused(1, table.layers[:1], "got 1 layers, 2 key and 2 value caches")
    refused(2, table.norm[:-1], "norm has shape")
    refused(3, table.head[:-1], "head has shape")
    refused(4, table.rotary[..., :-2], "rotary has shape")
    refused(5, [each[..., :12] for each in table.keys], "query has 64 outputs beside 2 kv_heads of width 12")
    refused(6, [each.double() for each in table.values], "values has dtype")
    for change, words in {
        "query_norm": "query_norm has shape", "key_bias": "key_bias has shape", "post_norm": "post_norm has shape",
    }.items():  # fmt: skip
        refused(1, [replace(table.layers[0], **{change: torch.ones(7)}), table.layers[1]], words)
    for changes in ({"window": -1}, {"rotary": 1}):
        refused(1, [replace(table.layers[0], **changes), table.layers[1]], "expected a window of 0 or more and a table")
    refused(7, DecoderNumbers(eps=1e-5, scale=1.0, activation="relu"), "activation is 'relu'; expected one of silu")
    refused(7, DecoderNumbers(eps=1e-5, scale=1.0, softcap=-1.0), "softcap is -1.0")


def errors(got: torch.Tensor, exact: torch.Tensor, size: float) -> tuple[float, float]:
    """Root mean square and largest."""
    apart = (got.double() - exact) / size if exact.numel() else torch.zeros(1)
    return float(apart.square().mean().sqrt()), float(apart.abs().max())


@needs_cpu
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(case=passes())
def test_the_error_is_at_most_twice_that_of_torch(isa: str, case: Pass) -> None:
    table = case.table(torch.float64)
    size = float(table.head.norm(dim=1).max() * (table.norm + table.numbers.norm_offset).abs().max())  # of a logit
    exact = run("reference", table, case.nodes)
    own = errors(run("reference", case.table(torch.float32), case.nodes), exact, size)
    found = errors(run(isa, case.table(torch.float32), case.nodes), exact, size)
    limits = [2 * error + amplification(table) * floor for error, floor in zip(own, FLOOR, strict=True)]
    assert all(error <= limit for error, limit in zip(found, limits, strict=True)), (found, own)

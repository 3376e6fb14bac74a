"""fused_forward: every backend and instruction set against float64, batch invariance, and bad arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.decoder_cases import Pass, made, passes

from specdec_kernels import DecoderTable, fused_forward, use_backend

ISAS = {"portable": 1, "avx2": 2, "avx512": 3}
BACKENDS = ["reference", *ISAS]
HERE = fused_forward.backends[0].missing()
needs_cpu = pytest.mark.skipif(HERE is not None, reason=HERE or "")
# What an error (root mean square, largest) may be above twice that of PyTorch's operators: a few roundings of values of
# size one, because the errors of few values are random, on either side.
FLOOR = 6e-7, 2e-6
ROWS = made(3, 4, 2, 16, 48, 40, 50, 2, 16, lengths=[0, 30, 5, 77], counts=[1, 6, 3, 9])


def run(backend: str, table: DecoderTable, nodes: tuple[Any, ...]) -> torch.Tensor:
    if backend == "reference":
        with use_backend("reference"):
            return fused_forward(table, *nodes)
    assert table.obstacle is None
    options = table.vocab_size, table.eps, table.scale, ISAS[backend]
    return torch.ops.specdec.fused_forward(table.addresses, *nodes, *options)


def amplification(table: DecoderTable) -> float:
    """By how much an RMS norm can amplify a rounding error.

    Over a hidden state of one number, the norm is `x / sqrt(x^2 + eps)`: its slope at 0 is `1 / sqrt(eps)`.
    """
    return 1.0 if table.embedding.shape[1] > 1 else table.eps**-0.5


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
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(backend: str) -> None:
    tokens, positions, _, slots, page_table, lengths, offsets, ancestors, depth = ROWS.nodes
    together = run(backend, ROWS.table(torch.float32), ROWS.nodes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(run(backend, ROWS.table(torch.float32), ROWS.nodes), together)
    finally:
        torch.set_num_threads(threads)
    for row in range(4):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        part = slice(begin, end)
        own = tokens[part], positions[part], None, slots[part], page_table[row : row + 1], lengths[row : row + 1]
        trees = torch.tensor([0, end - begin], dtype=torch.int32), ancestors[part], depth[part]
        assert torch.equal(run(backend, ROWS.table(torch.float32), (*own, *trees)), together[part])


@needs_cpu
def test_wanted_nodes_come_in_their_order_and_may_repeat() -> None:
    wanted = torch.tensor([18, 0, 7, 7])
    nodes = (*ROWS.nodes[:2], wanted, *ROWS.nodes[3:])
    every = fused_forward(ROWS.table(torch.float32), *ROWS.nodes)
    assert torch.equal(fused_forward(ROWS.table(torch.float32), *nodes), every[wanted])


@needs_cpu
def test_step_by_step_is_all_at_once() -> None:
    """Tokens one by one attend to the stored keys, as one causal pass does: the same bits."""
    case = made(5, 2, 1, 32, 32, 48, 40, 2, 4, lengths=[0], counts=[20], causal=True)
    tokens, positions, _, slots, page_table, _, _, _, _ = case.nodes
    want, table, got = fused_forward(case.table(torch.float32), *case.nodes), case.table(torch.float32), []
    for at in range(20):
        one = slice(at, at + 1)
        length, offsets = torch.tensor([at], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        got.append(fused_forward(table, tokens[one], positions[one], None, slots[one], page_table, length, offsets))
    assert torch.equal(torch.cat(got), want)


def test_a_copy_has_its_own_addresses() -> None:
    table = ROWS.table(torch.float32)
    twin = copy.deepcopy(table)
    assert twin.obstacle is None and not bool((twin.addresses[:4] == table.addresses[:4]).any())
    want = fused_forward(table, *ROWS.nodes)
    table.embedding.zero_()
    assert torch.equal(fused_forward(twin, *ROWS.nodes), want)
    assert torch.equal(twin.keys[0], table.keys[0])


def test_the_reference_serves_what_cpp_cannot() -> None:
    double = ROWS.table(torch.float64)
    rows = {row.backend: row for row in fused_forward.explain(double, *ROWS.nodes)}
    assert rows["reference"].chosen and "expected torch.float32" in str(rows["cpu"].reason)
    layers = [copy.copy(each) for each in ROWS.table(torch.float32).layers]
    by_output = type(layers[0])(*(getattr(layers[0], name).contiguous() for name in layers[0].__slots__))
    table = ROWS.table(torch.float32)
    other = DecoderTable(
        table.embedding, [by_output, layers[1]], table.norm, table.head, table.rotary, table.keys, table.values,
        eps=table.eps, scale=table.scale,
    )  # fmt: skip
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
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("backend", ["reference", None])
def test_bad_arguments(backend: str | None, wrong: str) -> None:
    at, change, words = WRONG[wrong]
    nodes = list(ROWS.nodes)
    nodes[at] = change(nodes[at])
    with use_backend(backend), pytest.raises(ValueError, match=words):
        fused_forward(ROWS.table(torch.float32), *nodes)


def test_weights_on_another_device_are_refused() -> None:
    table = ROWS.table(torch.float32)
    head = torch.empty(table.head.shape, device="meta")
    parts = [table.embedding, table.layers, table.norm, head, table.rotary, table.keys, table.values]
    other = DecoderTable(*parts, eps=table.eps, scale=table.scale)  # type: ignore[arg-type]
    assert other.obstacle == "a part of the decoder is on meta; expected all of it on cpu"
    wide = made(1, 1, 1, 514, 8, 8, 8, 1, 4, lengths=[0], counts=[1]).table(torch.float32)
    assert wide.obstacle == "heads are 514 wide; expected at most 512"


def test_a_list_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="decoder is list; expected a DecoderTable"):
        fused_forward([], *ROWS.nodes)


def test_weights_that_do_not_fit_are_refused() -> None:
    table = ROWS.table(torch.float32)
    parts = [table.embedding, table.layers, table.norm, table.head, table.rotary, table.keys, table.values]

    def refused(at: int, value: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            DecoderTable(*parts[:at], value, *parts[at + 1 :], eps=1e-5, scale=1.0)  # type: ignore[arg-type]

    refused(0, table.embedding.long(), "embedding is no float tensor")
    refused(1, table.layers[:1], "got 1 layers, 2 key and 2 value caches")
    refused(2, table.norm[:-1], "norm has shape")
    refused(3, table.head[:-1], "head has shape")
    refused(4, table.rotary[:, :-2], "rotary has shape")
    refused(5, [each[..., :12] for each in table.keys], "query has 64 outputs beside 2 kv_heads of width 12")
    refused(6, [each.double() for each in table.values], "values has dtype")


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
    size = float(table.head.norm(dim=1).max() * table.norm.abs().max())  # of a logit behind a norm
    exact = run("reference", table, case.nodes)
    own = errors(run("reference", case.table(torch.float32), case.nodes), exact, size)
    found = errors(run(isa, case.table(torch.float32), case.nodes), exact, size)
    limits = [2 * error + amplification(table) * floor for error, floor in zip(own, FLOOR, strict=True)]
    assert all(error <= limit for error, limit in zip(found, limits, strict=True)), (found, own)

"""draft_chain: every backend equals passes and samples one at a time, and refused calls have no effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.decoder_cases import Pass, made
from torch import Tensor

from specdec_kernels import (
    DecoderTable,
    distribution_stats,
    draft_chain,
    draft_sample,
    fused_forward,
    kv_slots,
    replay_sample,
    use_backend,
)  # fmt: skip

ISAS = {"portable": 1, "avx2": 2, "avx512": 3}
HERE = draft_chain.backends[0].missing()
needs_cpu = pytest.mark.skipif(HERE is not None, reason=HERE or "")


@dataclass
class Chains:
    """Some rows of a larger cache. lengths: of all its rows; fed, drafts, rows: of those that draft."""

    decoder: Pass
    tokens: Tensor
    fed: list[int]
    drafts: list[int]
    rows: Tensor
    lengths: Tensor
    asked: tuple[Tensor, ...]
    vocab: int

    def arguments(self, dtype: torch.dtype = torch.float32) -> list[Any]:
        """Returns the arguments of one call, with its own decoder and lengths."""
        offsets = torch.tensor([0, *self.fed]).cumsum(0).int()
        table = self.decoder.nodes[4]
        where = [self.decoder.table(dtype), self.tokens, offsets, self.drafts, self.rows, table, self.lengths.clone()]
        return [*where, *self.asked, self.vocab]


def chains(
    seed: int, fed: list[int], drafts: list[int], temperature: list[float], filters: bool = False, vocab: int = 50,
    picked: int | None = None, page: int = 4, kv_heads: int = 2, width: int = 16,
) -> Chains:  # fmt: skip
    batch, generator = len(fed), torch.Generator().manual_seed(seed)
    rows = torch.randperm(batch + 2, generator=generator)[:batch]
    grows = torch.zeros(batch + 2, dtype=torch.int64)
    grows[rows] = torch.tensor(fed) + torch.tensor(drafts)
    lengths = torch.randint(0, 30, (batch + 2,), generator=generator)
    decoder = made(
        seed, 2 * kv_heads, kv_heads, width, 48, 40, vocab, 2, page, lengths.tolist(), grows.tolist(),
    )  # fmt: skip
    decoder.weights["head"][0].mul_(3)
    decoder.weights["rotary"][0] = decoder.weights["rotary"][0].repeat(3, 1)  # more positions than are needed

    def each(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor((values * batch)[:batch], dtype=dtype)

    asked = (
        torch.tensor(temperature, dtype=torch.float32),
        each([0, 7, 0] if filters else [0], torch.int32),
        each([0.9, 1.0, 0.7] if filters else [1.0], torch.float32),
        each([0.0, 0.0, 0.02] if filters else [0.0], torch.float32),
        torch.randint(0, 2**60, (batch,), generator=generator),
        torch.randint(0, 1000, (batch,), generator=generator).int(),
    )
    tokens = torch.randint(0, vocab, (sum(fed),), generator=generator)
    return Chains(decoder, tokens, fed, drafts, rows.int(), lengths.int(), asked, picked or vocab)


SOME = chains(1, [1, 3, 1, 2], [4, 1, 2, 4], [1.0, 0.7, 0.0, 1.5])
CASES = {
    "sampled": SOME,
    "one row": chains(2, [2], [5], [1.0]),
    "greedy": chains(3, [1, 2], [3, 3], [0.0, 0.0]),
    "filters": chains(4, [1, 2, 1], [3, 2, 4], [0.8, 1.0, 1.2], filters=True),
    "some ids": chains(5, [2, 1], [3, 4], [1.0, 1.0], picked=31),
    "over 1024 ids": chains(6, [2, 1], [2, 3], [1.0, 0.9], vocab=2100),
    "pages of one": chains(7, [9, 1], [1, 6], [1.0, 1.0], page=1, kv_heads=1, width=6),
}


def one_at_a_time(arguments: list[Any], first_draw: int | None) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Returns tokens and the distribution of each level, by separate operators."""
    table, tokens, offsets, drafts, rows, page_table, lengths, temperature, *filters, seeds, roots, vocab = arguments
    sampled, dists = torch.full((len(drafts), max(drafts)), -1), []
    at, fed, starts = list(range(len(drafts))), tokens, offsets
    for level in range(max(drafts)):
        page = table.keys[0].shape[1]
        own, held, slots, places = kv_slots(page_table, lengths, rows[at], starts, None, len(fed), page, True)
        last = starts[1:].long() - 1
        logits = fused_forward(table, fed, places, last, slots, own, held, starts)[:, :vocab]
        inv_t, lse, cut, tie, mass = distribution_stats(
            logits, temperature[at], *(part[at] for part in filters), masses=True
        )
        if first_draw is None:
            picked = replay_sample(logits, inv_t, cut, tie, seeds[at], roots[at] + level + 1)
        else:
            index = torch.full((len(at),), first_draw + level, dtype=torch.int32)
            picked = draft_sample(logits, inv_t, lse, cut, tie, seeds[at], roots[at], index)
        dists.append((logits, inv_t, lse, cut, tie, mass))
        sampled[at, level] = picked
        at = [row for row in at if drafts[row] > level + 1]
        fed, starts = sampled[at, level], torch.arange(len(at) + 1, dtype=torch.int32)
    return sampled, dists


def on_isa(arguments: list[Any], isa: str, first_draw: int | None) -> Any:
    table, tokens, offsets, drafts, *rest, vocab = arguments
    counts = torch.tensor(drafts, dtype=torch.int32)
    given = (table.addresses, tokens, offsets, counts, *rest)
    if first_draw is None:
        return torch.ops.specdec.draft_chain(*given, max(drafts), vocab, ISAS[isa])
    sizes = (first_draw, max(drafts), sum(drafts), vocab, table.vocab_size)
    found = torch.ops.specdec.draft_chain_dists(*given, *sizes, ISAS[isa])
    return found[0], found[1][:, :vocab], *found[2:]


@needs_cpu
@pytest.mark.parametrize("first_draw", [None, 0, 7])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_passes_one_at_a_time(case: str, first_draw: int | None) -> None:
    apart, together = CASES[case].arguments(), CASES[case].arguments()
    want, dists = one_at_a_time(apart, first_draw)
    got = draft_chain(*together, first_draw=first_draw)
    assert draft_chain.last_backend == "cpu"
    sampled, *found = (got,) if first_draw is None else got
    assert torch.equal(sampled, want)
    assert torch.equal(together[6], apart[6]), "lengths"
    for name in ("keys", "values"):
        assert all(map(torch.equal, getattr(together[0], name), getattr(apart[0], name)))
    if first_draw is not None:
        for one, other in zip(found, (torch.cat(parts) for parts in zip(*dists, strict=True)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@needs_cpu
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("first_draw", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_float64(case: str, first_draw: int | None, isa: str) -> None:
    """In cases that rounding does not decide: they are fixed, and none is that close."""
    exact, narrow = CASES[case].arguments(torch.float64), CASES[case].arguments()
    with use_backend("reference"):
        want = draft_chain(*exact, first_draw=first_draw)
    got = on_isa(narrow, isa, first_draw)
    sampled, expected = (got, want) if first_draw is None else (got[0], want[0])
    assert torch.equal(sampled, expected)
    assert torch.equal(narrow[6], exact[6])
    if first_draw is not None:
        torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-3)
        for one, other in zip((got[2], got[3]), (want[2], want[3]), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)


@needs_cpu
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ragged_batches(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 5))
    fed = [data.draw(st.sampled_from([1, 1, 2, 9])) for _ in range(batch)]
    drafts = [data.draw(st.integers(1, 5)) for _ in range(batch)]
    heat = [data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.5])) for _ in range(batch)]
    page = data.draw(st.sampled_from([1, 5, 16]))
    case = chains(data.draw(st.integers(0, 999)), fed, drafts, heat, data.draw(st.booleans()), page=page)
    first_draw = data.draw(st.sampled_from([None, 0, 5]))
    apart, together = case.arguments(), case.arguments()
    want, _ = one_at_a_time(apart, first_draw)
    got = draft_chain(*together, first_draw=first_draw)
    assert torch.equal(got if first_draw is None else got[0], want)
    assert torch.equal(together[6], apart[6])


@needs_cpu
def test_two_threads_draft_what_one_does() -> None:
    """The chains have enough tokens to start the second thread."""
    case = chains(8, [1, 2], [3, 2], [1.0, 0.8], vocab=80_000, kv_heads=1)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([draft_chain(*case.arguments()), *draft_chain(*case.arguments(), first_draw=0)[:6]])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@needs_cpu
def test_a_row_drafts_the_same_alone() -> None:
    want = draft_chain(*SOME.arguments())
    table, tokens, offsets, drafts, rows, page_table, lengths, *asked, vocab = SOME.arguments()
    for row, count in enumerate(drafts):
        own = slice(row, row + 1)
        fed = tokens[int(offsets[row]) : int(offsets[row + 1])]
        ends = torch.tensor([0, len(fed)], dtype=torch.int32)
        alone = (table, fed, ends, [count], rows[own], page_table, lengths, *(part[own] for part in asked), vocab)
        assert torch.equal(draft_chain(*alone)[0], want[row, :count])


@pytest.mark.parametrize("backend", ["reference", None])
def test_no_temperature_is_temperature_zero(backend: str | None) -> None:
    cold = SOME.arguments()
    cold[7] = torch.zeros_like(cold[7])
    with use_backend(backend):
        want = draft_chain(*cold)
        greedy = SOME.arguments()
        greedy[7] = None
        assert torch.equal(draft_chain(*greedy), want)
    assert not torch.equal(draft_chain(*SOME.arguments()), want)


@needs_cpu
def test_what_a_row_stores() -> None:
    """A row stores all processed tokens: all drafts but the last. Other rows keep their lengths."""
    table, tokens, offsets, drafts, rows, page_table, lengths, *rest = SOME.arguments()
    before = lengths.clone()
    draft_chain(table, tokens, offsets, drafts, rows, page_table, lengths, *rest)
    grown = torch.zeros_like(before)
    grown[rows.long()] = (offsets[1:] - offsets[:-1]) + torch.tensor(drafts, dtype=torch.int32) - 1
    assert torch.equal(lengths, before + grown)


def late(table: Tensor) -> Tensor:
    """Removes the last page of the row that drafts most."""
    row = int(SOME.rows[0])
    last = (int(SOME.lengths[row]) + SOME.fed[0] + SOME.drafts[0] - 2) // SOME.decoder.weights["keys"][0].shape[1]
    changed = table.clone()
    changed[row, last] = 10**6
    return changed


WRONG: dict[str, tuple[int, Any, str]] = {
    "token beyond": (1, lambda old: old.index_fill(0, torch.tensor([2]), 50), "tokens"),
    "token below": (1, lambda old: old.index_fill(0, torch.tensor([2]), -1), "tokens"),
    "tokens int32": (1, lambda old: old.int(), "tokens has dtype"),
    "offsets": (2, lambda old: old + 1, "offsets"),
    "offsets short": (2, lambda old: old[:-1], "offsets has shape"),
    "too many tokens": (2, lambda old: old.clamp(max=6), "of 7 tokens"),
    "a row is fed nothing": (2, lambda old: torch.tensor([0, 1, 4, 4, 7], dtype=torch.int32), "at least one"),
    "a row drafts nothing": (3, lambda old: [4, 0, 2, 4], "at least one"),
    "drafts of three rows": (3, lambda old: [4, 1, 2], "at least one|drafts"),
    "row beyond": (4, lambda old: old.clamp(min=6), "row ids below 6"),
    "row below": (4, lambda old: old - 9, "row ids below 6"),
    "row twice": (4, lambda old: old.index_fill(0, torch.tensor([0, 1]), 3), "different row ids below 6"),
    "pages": (5, lambda old: old.index_fill(1, torch.tensor([0]), 9999), "page"),
    "a page that a later pass would read": (5, lambda old: late(old), "page"),
    "lengths": (6, lambda old: old + 1000, "at most"),
    "lengths below": (6, lambda old: old - 1000, "at most"),
    "temperature": (7, lambda old: -old, "temperature"),
    "top_k": (8, lambda old: old - 1, "top_k"),
    "top_p": (9, lambda old: old * 0, "top_p"),
    "min_p": (10, lambda old: old + 2, "min_p"),
    "seeds": (11, lambda old: old[:-1], "seeds has shape"),
    "positions": (12, lambda old: old.long(), "positions has dtype"),
    "vocab": (13, lambda old: 51, "vocab_size is 51"),
    "no vocab": (13, lambda old: 0, "vocab_size is 0"),
}


@pytest.mark.parametrize("first_draw", [None, 0])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("backend", ["reference", None])
def test_bad_arguments_change_no_length(backend: str | None, wrong: str, first_draw: int | None) -> None:
    at, change, words = WRONG[wrong]
    arguments = SOME.arguments()
    arguments[at] = change(arguments[at])
    before = arguments[6].clone()
    with use_backend(backend), pytest.raises(ValueError, match=words):
        draft_chain(*arguments, first_draw=first_draw)
    assert torch.equal(arguments[6], before)


@needs_cpu
def test_other_rows_lengths_are_not_touched() -> None:
    """They are not even written back, since another thread may own them."""
    arguments = SOME.arguments()
    others = torch.ones(len(arguments[6]), dtype=torch.bool)
    others[arguments[4].long()] = False
    want = torch.full_like(arguments[6][others], -7)
    arguments[6][others] = want
    draft_chain(*arguments)
    assert torch.equal(arguments[6][others], want)


@needs_cpu
def test_numpy_and_tensor_drafts_are_accepted() -> None:
    arguments = SOME.arguments()
    arguments[3] = [float(count) for count in arguments[3]]
    assert torch.equal(draft_chain(*arguments), draft_chain(*SOME.arguments()))
    assert torch.equal(draft_chain(*SOME.arguments()), draft_chain(*SOME.arguments()))


@pytest.mark.parametrize("at", [8, 9, 10])
def test_filters_are_checked_without_a_temperature_too(at: int) -> None:
    arguments = SOME.arguments()
    arguments[7], arguments[at] = None, arguments[at] - 5
    with pytest.raises(ValueError, match=("top_k", "top_p", "min_p")[at - 8]):
        draft_chain(*arguments)


def test_bad_first_draws_and_decoders_are_refused() -> None:
    with pytest.raises(ValueError, match="first_draw is -1"):
        draft_chain(*SOME.arguments(), first_draw=-1)
    with pytest.raises(ValueError, match="decoder is list; expected a DecoderTable"):
        draft_chain([], *SOME.arguments()[1:])


def test_the_reference_serves_what_cpp_cannot() -> None:
    double = SOME.arguments(torch.float64)
    assert isinstance(double[0], DecoderTable)
    rows = {row.backend: row for row in draft_chain.explain(*double)}
    assert rows["reference"].chosen and "expected torch.float32" in str(rows["cpu"].reason)


@pytest.mark.parametrize("first_draw", [None, 0])
@pytest.mark.parametrize("case", ["sampled", "greedy", "filters", "over 1024 ids"])
@pytest.mark.parametrize("backend", ["reference", None])
def test_no_token_is_drafted_from_nan(backend: str | None, case: str, first_draw: int | None) -> None:
    """A row that is fed NaN has no tokens, from its first draft on. Other rows draft what they did."""
    arguments = CASES[case].arguments()
    with use_backend(backend):
        clean = draft_chain(*CASES[case].arguments(), first_draw=first_draw)
        want = (clean if first_draw is None else clean[0]).clone()
        arguments[0].embedding[arguments[1][0]] = torch.nan  # the first token of row 0
        got = draft_chain(*arguments, first_draw=first_draw)
    bad = [int(arguments[1][0]) in part for part in arguments[1].split(CASES[case].fed)]
    found = got if first_draw is None else got[0]
    for row, (is_bad, count) in enumerate(zip(bad, CASES[case].drafts, strict=True)):
        assert found[row, :count].tolist() == ([-1] * count if is_bad else want[row, :count].tolist())
    assert not all(bad) and (want[:, 0] >= 0).all()


@pytest.mark.parametrize("backend", ["reference", None])
def test_a_chain_goes_on_behind_a_token_without_distribution(backend: str | None) -> None:
    """One draft token leads to NaN: it is drafted itself, and stored; no token follows it."""
    arguments = CASES["one row"].arguments()
    with use_backend(backend):
        want = draft_chain(*CASES["one row"].arguments())[0].tolist()
        arguments[0].embedding[want[1]] = torch.nan
        lengths = arguments[6].clone()
        got = draft_chain(*arguments)[0].tolist()
    assert len(set(want[:2])) == 2 and want[1] not in arguments[1].tolist(), "the case tests nothing"
    assert got == [*want[:2], -1, -1, -1]
    assert int((arguments[6] - lengths).sum()) == 2 + 5 - 1

"""Logits processors: token counts that grow with the text, packing, and `process` on ragged trees."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.processed_decoding import processed, processed_dist
from oracles.toy_grammar import counting

from specdec_fast.core.draft import Draft
from specdec_fast.sampling import target_distributions as sampling_module
from specdec_fast.sampling.logits_processors import TokenCounts
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable
from specdec_fast.sampling.target_distributions import (
    chain_distributions,
    find_invalid_distributions,
    target_distributions,
)
from specdec_kernels import tree_plan

CPU = torch.device("cpu")
VOCAB = 12


def held(counts: TokenCounts, row: int) -> dict[int, int]:
    ids_of, times_of, sizes = counts.tables()
    used = int(sizes[row])
    ids, times = ids_of[row, :used].tolist(), times_of[row, :used].tolist()
    assert len(set(ids)) == used, "an id is listed twice"
    return dict(zip(ids, times, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_incremental_counts_equal_counts_of_the_whole_text(data: Any) -> None:
    """Counts are read after some of the changes only, so unwritten changes of several texts accumulate."""
    counts = TokenCounts(CPU)
    texts: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(data.draw(st.integers(0, 12))):
        row, tokens = data.draw(st.integers(0, 5)), data.draw(st.lists(st.integers(0, 200), max_size=90))
        leaves, looks, inference = (data.draw(st.booleans()) for _ in range(3))
        if row in texts and leaves:
            counts.leave(row)
            del texts[row]
        elif row in texts:
            counts.append(row, tokens)
            texts[row][1].extend(tokens)
        else:
            half = len(tokens) // 2
            counts.join(row, tokens[:half], tokens[half:])
            texts[row] = tokens[:half], tokens[half:]
        assert all((row in counts) == (row in texts) for row in range(6))
        with torch.inference_mode(inference):
            for row, (prompt, new) in texts.items() if looks else ():
                assert held(counts, row) == {token: Counter(new)[token] for token in [*prompt, *new]}


def test_appending_writes_in_place() -> None:
    """No table is rebuilt while there is space."""
    counts = TokenCounts(CPU)
    counts.join(2, [1, 2], [2])
    before = [table.data_ptr() for table in counts.tables()]
    for token in range(40):
        counts.append(2, [token, token])
    assert [table.data_ptr() for table in counts.tables()] == before
    assert held(counts, 2)[2] == 3 and held(counts, 2)[39] == 2


def test_unwritten_counts_of_a_text_do_not_reach_the_next_one_in_its_row() -> None:
    counts = TokenCounts(CPU)
    counts.join(0, [1, 2, 3], [4])
    counts.leave(0)
    counts.join(0, [9], [9, 9])
    assert held(counts, 0) == {9: 2}
    counts.leave(0)
    counts.join(0, [], [])
    assert held(counts, 0) == {}


def test_a_short_text_may_follow_a_long_one_that_left_before_it_was_written() -> None:
    counts = TokenCounts(CPU)
    counts.join(1, range(62), [])
    assert len(held(counts, 1)) == 62
    room = counts.tables()[0].shape
    counts.append(1, range(62, 62 + room[1]))
    counts.leave(1)
    counts.join(1, [5], [6])
    assert held(counts, 1) == {5: 0, 6: 1}
    assert counts.tables()[0].shape == room, "room was made for a text that is gone"


ROWS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    {},
    {"logit_bias": {3: 1.5, 0: -2.0}, "banned_token_ids": (4, 5), "min_new_tokens": 4},
    {"forced_tokens": {3: 7}, "allowed_token_ids": (1, 7, 8)},
    {"grammar": counting(VOCAB), "banned_token_ids": (1,), "allowed_token_ids": tuple(range(10))},
    {"repetition_penalty": 0.5, "grammar": counting(VOCAB, 5), "logit_bias": {2: 0.5}},
]
ENDS = (11,)


FOLDED = [
    pytest.param(dtype, folds, id=f"{str(dtype).removeprefix('torch.')} {'folded' if folds else 'in place'}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    for folds in (False, True)
    if dtype != torch.float64 or not folds
]
"""Dtypes of logits, and whether processors are applied as an overlay, as on a GPU."""


def dists_of(folds: bool, draft: Draft, logits: torch.Tensor, sampling: Any, roots: torch.Tensor) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling_module, "uses_overlay", lambda logits: folds)
        return target_distributions(draft, tree_plan(draft.parents, draft.offsets), logits, sampling, roots)


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize(("dtype", "folds"), FOLDED)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_distribution_of_every_node_is_that_of_its_own_text(dtype: torch.dtype, folds: bool, data: Any) -> None:
    order = data.draw(st.permutations(range(len(ROWS))))[: data.draw(st.integers(1, 6))]
    table = SamplingTable(CPU)
    params, prompts, texts = {}, {}, {}
    for row in order:
        params[row] = SamplingParams(seed=row, max_new_tokens=20, **ROWS[row])
        prompts[row] = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
        new: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):
            dist = processed(np.zeros(VOCAB), params[row], prompts[row], new, ENDS)
            new.append(data.draw(st.sampled_from([t for t in range(VOCAB - 1) if dist[t] > -np.inf])))
        texts[row] = new
        at = data.draw(st.integers(0, len(new)))
        table.set(row, params[row], len(prompts[row]), ENDS, [*prompts[row], *new[:at]])
        if row in table.rows_to_update:
            table.append(row, new[at:])
    trees = []
    for row in order:
        size = data.draw(st.integers(1, 6))
        tokens = [[*prompts[row], *texts[row]][-1], *(data.draw(st.integers(0, VOCAB - 1)) for _ in range(size - 1))]
        trees.append((tokens, [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))]))
    draft = Draft.trees(order, trees)
    sampling = table.pack(order)
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = (torch.randn(draft.num_nodes, VOCAB, generator=source, dtype=torch.float64) * 2).to(dtype)
    roots = torch.tensor([len(prompts[row]) + len(texts[row]) - 1 for row in order], dtype=torch.int32)
    given_logits = logits.clone()
    dists = dists_of(folds, draft, given_logits, sampling, roots)
    assert not folds or torch.equal(given_logits, logits), "logits were written"
    weights, at = dists.probs().double().numpy(), 0
    for row, (tokens, parents) in zip(order, trees, strict=True):
        for node in range(len(tokens)):
            path, here = [], node
            while parents[here] >= 0:
                path.append(tokens[here])
                here = parents[here]
            new = [*texts[row], *path[::-1]]
            reachable, grammar = True, params[row].grammar
            for place in range(len(texts[row]), len(new)):
                reachable &= grammar is None or new[place] in grammar.follows(new[:place])[0] - set(ENDS)
                if not reachable:
                    break
            if reachable:
                row_logits = logits[at].double().numpy()
                left = processed(row_logits, params[row], prompts[row], new, ENDS)
                if np.isinf(left).all():
                    assert math.isnan(dists.lse[at])
                else:
                    want = processed_dist(row_logits, params[row], prompts[row], new, ENDS)
                    assert np.allclose(weights[at], want, atol=1e-6), (row, node)
            else:
                assert not math.isnan(dists.lse[at]), "a node that cannot be reached must not break a rule's arithmetic"
            at += 1


def test_chains_get_the_distributions_of_trees() -> None:
    """A draft model's distributions after its own chains equal those of `process` at the last node."""
    table = SamplingTable(CPU)
    chains = [[3, 2, 2], [1], [5, 4], [6, 7, 1, 1], [1, 2], [2, 2]]
    for row, changes in enumerate(ROWS):
        table.set(row, SamplingParams(seed=1, **changes), 2, ENDS, [9, chains[row][0]])
    draft = Draft.chains(range(6), chains)
    sampling, roots = table.pack(range(6)), torch.ones(6, dtype=torch.int32)
    logits = torch.randn(draft.num_nodes, VOCAB, generator=torch.Generator().manual_seed(1))
    last = [int(end) - 1 for end in draft.offsets[1:]]
    want = target_distributions(
        draft, tree_plan(draft.parents, draft.offsets), logits.clone(), sampling, roots
    ).probs()[last]
    got = chain_distributions(logits[last].clone(), sampling, roots, chains).probs()
    assert torch.allclose(got, want, equal_nan=True)
    narrow = chain_distributions(logits[last, :7].clone(), sampling, roots, chains)
    assert not torch.isnan(narrow.lse).any(), "a draft with a smaller vocabulary is left something"


def test_a_draft_without_allowed_tokens_keeps_its_own_distribution() -> None:
    table = SamplingTable(CPU)
    table.set(0, SamplingParams(seed=1, allowed_token_ids=(10,)), 1, ENDS)
    table.set(1, SamplingParams(seed=1, banned_token_ids=(0,)), 1, ENDS)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))
    weights = chain_distributions(
        logits.clone(), table.pack([0, 1]), torch.zeros(2, dtype=torch.int32), [[1], [2]]
    ).probs()
    assert torch.allclose(weights[0], logits[0].softmax(0)) and weights[1, 0] == 0


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize("folds", [False, True])
def test_half_formats_keep_small_penalties(folds: bool) -> None:
    """Logits near 20 have steps of 0.125 in bfloat16, and a penalty of 0.05 must not vanish."""
    table = SamplingTable(CPU)
    table.set(0, SamplingParams(seed=1, presence_penalty=0.05), 1, (), [1, 2])
    draft = Draft.chains([0], [[2]])
    logits = torch.full((1, 4), 20.0, dtype=torch.bfloat16)
    dists = dists_of(folds, draft, logits, table.pack([0]), torch.tensor([1]).int())
    assert dists.logits.dtype == (torch.bfloat16 if folds else torch.float32)
    assert abs(float(dists.probs()[0, 2] / dists.probs()[0, 1]) - math.exp(-0.05)) < 1e-6


@pytest.mark.parametrize("row", [{"banned_token_ids": (1,), "forced_tokens": {5: 3}}, ROWS[4], {"min_new_tokens": 2}])
def test_masks_make_no_wider_copy(row: dict[str, Any]) -> None:
    """Bans, forced tokens, allowed tokens, grammars and minimal lengths are exact in half formats, in place."""
    table = SamplingTable(CPU)
    table.set(0, SamplingParams(seed=1, **row), 1, ENDS, [])
    table.set(1, SamplingParams(seed=1), 1, ENDS, [])
    draft = Draft.chains([0, 1], [[2], [3]])
    logits = torch.full((2, VOCAB), 20.0, dtype=torch.bfloat16)
    target_distributions(
        draft, tree_plan(draft.parents, draft.offsets), logits, table.pack([0, 1]), torch.zeros(2).int()
    )
    assert bool((logits[0] == -torch.inf).any()) and bool((logits[1] == 20).all())


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize("folds", [False, True])
def test_errors_name_the_place_and_the_reason(folds: bool) -> None:
    table = SamplingTable(CPU)
    for row in range(3):
        limits: dict[str, Any] = {"allowed_token_ids": (1,)} if row < 2 else {}
        table.set(row, SamplingParams(seed=1, **limits), 1, ())
    draft = Draft.chains([0, 1, 2], [[1, 1], [1, 1], [1, 1]])
    logits = torch.zeros(6, 4)
    logits[1, 1] = -math.inf
    logits[2, 1] = math.nan
    logits[5] = math.nan
    sampling = table.pack([0, 1, 2])
    dists = dists_of(folds, draft, logits, sampling, torch.zeros(3, dtype=torch.int32))
    path = torch.tensor([[0, 1], [2, 3], [4, -1]], dtype=torch.int32)
    found = find_invalid_distributions(path, dists, sampling)
    assert found.keys() == {0, 1} and found[0][0] == 1 and found[1][0] == 0
    assert "leave no token" in found[0][1] and "model returned NaN" in found[1][1]

"""Token recycling: the tree, what a step teaches, and what requests share."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.drafters import make_drafter
from specdec_fast.drafters.recycling import RecyclingDrafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput
from specdec_kernels.random import replay_noise

VOCAB = 12
NOTHING = Acceptance(torch.zeros(0), torch.zeros(0), torch.zeros(0))


def recycling(**options: Any) -> Any:
    return get_drafter("recycling")(**options)


def learn(drafter: Any, rows: list[int], chains: list[list[int]], logits: torch.Tensor) -> None:
    drafter.observe(None, Draft.chains(rows, chains), NOTHING, TargetOutput(logits))


def logits_for(successors: list[list[int]]) -> torch.Tensor:
    """Returns rows of logits whose largest entries are these tokens, in order."""
    rows = torch.zeros(len(successors), VOCAB)
    for row, tokens in zip(rows, successors, strict=True):
        for at, token in enumerate(tokens):
            row[token] = 9.0 - at
    return rows


@torch.inference_mode()
def tree(drafter: Any, text: list[int], limit: int, **sampling: Any) -> tuple[list[int], list[int]]:
    state = DecodeState(1, 99)
    row = state.join(text, SamplingParams(**{"seed": 1, **sampling}), len(text), ())
    drafter.begin(state, [row], None)
    draft = drafter.propose(state, [row], Budget([limit]), state.rng([row]))
    draft.check(VOCAB)
    return draft.tokens.tolist(), draft.parents.tolist()


def test_successors_grow_a_tree_by_its_likeliest_path() -> None:
    drafter = recycling(top_k=2, depth=3, num_draft_tokens=20, min_probability=0.0)
    assert tree(drafter, [1], 9) == ([1], [-1]), "before anything was seen"
    learn(drafter, [0], [[1, 2, 3]], logits_for([[2, 3], [4, 1], [5, 6]]))
    # a first successor has probability e / (1 + e) = 0.73, a second 0.27; 4, 5 and 6 have no successors yet
    want = ([1, 2, 4, 3, 1, 5, 2, 6, 3], [-1, 0, 1, 0, 1, 3, 4, 3, 4])
    assert tree(drafter, [1], 20) == want
    drafter.num_draft_tokens = 3
    assert tree(drafter, [1], 20) == want, "a request may ask for more than is usual"
    assert tree(drafter, [1], 4) == (want[0][:5], want[1][:5]), "a smaller budget takes the first of them"
    assert tree(drafter, [7], 20) == ([7], [-1]) and tree(drafter, [1], 0) == ([1], [-1])
    assert tree(recycling(top_k=2), [1], 9) == ([1], [-1]), "and nothing is left to another drafter"


def test_paths_below_the_least_probability_are_left_out() -> None:
    for least, want in ((0.25, [1, 2, 4, 3]), (0.5, [1, 2, 4]), (0.75, [1])):
        drafter = recycling(top_k=2, min_probability=least)
        learn(drafter, [0], [[1, 2]], logits_for([[2, 3], [4, 5]]))
        assert tree(drafter, [1], 9)[0] == want, least


def test_temperature_and_filters_are_those_of_the_request() -> None:
    drafter = recycling(top_k=3, depth=1, min_probability=0.2)
    learn(drafter, [0], [[1]], torch.tensor([[0.0] * 5 + [2.0, 3.0, 4.0] + [0.0] * 4]))
    assert tree(drafter, [1], 9)[0] == [1, 7, 6], "0.67, 0.24 and 0.09 of what is noted"
    assert tree(drafter, [1], 9, temperature=4.0)[0] == [1, 7, 6, 5]
    assert tree(drafter, [1], 9, temperature=0.0)[0] == [1, 7], "surer at temperature 0"
    for kept in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert tree(drafter, [1], 9, **kept)[0] == [1, 7], kept


@torch.inference_mode()
@pytest.mark.parametrize("width", [VOCAB, 6])
def test_under_replay_trees_follow_the_request_s_noise(width: int) -> None:
    """With complete, exact distributions the target's choice is always the first. With half of the tokens it is first
    if it is among them. Unlisted tokens lower the probabilities by their chance of being the Gumbel-max.
    """
    logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    drafter = recycling(top_k=width, depth=1, pick="coupled", min_probability=0.0, num_draft_tokens=1)
    learn(drafter, [0], [list(range(VOCAB))], logits)
    state, hits, noted, promised = DecodeState(1, 99), 0, 0, 0.0
    for seed in range(400):
        text = [seed % VOCAB]
        row = state.join(text, SamplingParams(seed=seed), 1, ())
        choice = int((logits[text[0]] + replay_noise(torch.tensor([seed]), torch.tensor([1]), VOCAB)).argmax())
        drafted = drafter.propose(state, [row], Budget([1]), state.rng([row])).tokens.tolist()[1]
        hits += drafted == choice
        noted += choice in logits[text[0]].topk(width).indices.tolist()
        promised += drafter.successors(0).grow(text[0], 1, 1, 0.0, 1.0, 0, 1.0, 0.0, (seed, 0))[2]
        state.leave(row)
    assert hits == noted and (noted == 400) == (width == VOCAB)
    assert 0.5 * hits < promised <= hits + 3 * math.sqrt(400) / 2


def test_the_last_node_of_a_token_counts() -> None:
    drafter = recycling(top_k=2)

    def after(token: int) -> list[int]:
        return [found for found, _ in drafter.successors(0).after(token)]

    learn(drafter, [0], [[1, 1, 2, 1]], logits_for([[3, 4], [5, 6], [7, 8], [9, 10]]))
    assert after(1) == [9, 10] and after(2) == [7, 8]
    learn(drafter, [0], [[1]], logits_for([[0, 11]]))
    assert after(1) == [0, 11] and after(3) == [], "token 0 is a token like any other"
    logits = logits_for([[0, 11]])
    for (_, value), want in zip(drafter.successors(0).after(1), logits.log_softmax(1)[0, [0, 11]].tolist()):
        assert value == pytest.approx(want, abs=1e-5)


def test_a_distribution_of_few_tokens_is_stored_whole() -> None:
    drafter, alone = recycling(top_k=4), torch.full((1, VOCAB), float("-inf"))
    alone[0, 3] = 1.0
    learn(drafter, [0], [[1]], alone)
    ((token, value),) = drafter.successors(0).after(1)
    assert token == 3 and abs(value) < 1e-6 and tree(drafter, [1], 3) == ([1, 3], [-1, 0])


def test_requests_learn_separately_or_together() -> None:
    apart, together = recycling(top_k=1), recycling(top_k=1, shared=True)

    def known(drafter: Any, row: int) -> list[list[int]]:
        return [[found for found, _ in drafter.successors(row).after(token)] for token in range(3)]

    for drafter in (apart, together):
        learn(drafter, [0, 1], [[1], [2]], logits_for([[3], [4]]))
    assert known(apart, 0) == [[], [3], []] and known(apart, 1) == [[], [], [4]]
    assert known(together, 0) == [[], [3], [4]] == known(together, 5)
    apart.release([0, 7])
    together.release([0])
    assert len(apart.successors(0)) == 0 and len(together.successors(0)) == 2


def test_prompts_are_learned_per_row_and_again_after_a_preemption() -> None:
    """The newest place of a token counts, the root is not learned, and rows are separate."""
    table, cycle = 4.0 * random_logits(VOCAB, VOCAB, seed=3), torch.arange(VOCAB).expand(VOCAB, VOCAB)
    target = AutomatonTarget(table, cycle, max_length=64)
    state, drafter = DecodeState(2, 64), make_drafter("recycling", {"top_k": 3, "shared": False}, target=target)
    texts = [[1, 2, 1, 5], [4, 2, 7]]
    rows = [state.join(text, SamplingParams(seed=at), len(text), ()) for at, text in enumerate(texts)]
    hidden = torch.eye(VOCAB)[[1, 2, 8, 4, 9]]  # the second 1 and the second row's 2 have other states
    drafter.begin(state, rows, TargetOutput(None, {"final_norm": hidden}))
    best = table.argmax(1).tolist()
    for row, want in ((rows[0], {1: best[8], 2: best[2]}), (rows[1], {4: best[4], 2: best[9]})):
        found = drafter.successors(row)  # type: ignore[attr-defined]
        assert len(found) == 2 and all(found.after(token)[0][0] == own for token, own in want.items())
    drafter.release([rows[0]])
    drafter.begin(state, rows[:1], TargetOutput(None, {"final_norm": torch.eye(VOCAB)[[1, 2, 1]]}))
    assert drafter.successors(rows[0]).after(1)[0][0] == best[1]  # type: ignore[attr-defined]

    params = SamplingParams(seed=5, max_new_tokens=40)
    prompt = list(range(VOCAB))
    engine = Engine(target, make_drafter("recycling", {"shared": False}, target=target))
    first = engine.generate([prompt], params)[0]
    assert first.tokens == Engine(AutomatonTarget(table, cycle)).generate([prompt], params)[0].tokens
    assert first.stats.tau > 5, "a prompt of all tokens gives the whole distribution before the first step"
    assert Engine(target, recycling(pick="coupled")).generate([prompt], params)[0].stats.steps > first.stats.steps


def test_shared_tables_can_be_emptied() -> None:
    drafter = recycling(shared=True)
    learn(drafter, [0], [[1]], logits_for([[3]]))
    drafter.forget()
    assert len(drafter.successors(0)) == 0


def test_it_shares_by_default_where_that_is_exact() -> None:
    def made(prefers: str, **options: Any) -> bool:
        target = AutomatonTarget(random_logits(5, 8))
        return bool(make_drafter("recycling", options, target=target, prefers=prefers).shared)  # type: ignore[attr-defined]

    assert made("coupled") and made("greedy") and not made("sampled")
    assert made("sampled", shared=True) and not made("coupled", shared=False)


def test_an_oracle_is_drafted_to_its_full_depth() -> None:
    """The next token depends on the newest alone, so a cycle is drafted whole once it was seen."""
    cycle = [3]
    while len(cycle) < 9:
        cycle.append((cycle[-1] * 5 + 1) % VOCAB)
    drafter = recycling(num_draft_tokens=6, top_k=1, shared=True)
    for token, following in pairwise(cycle):
        learn(drafter, [0], [[token]], 9.0 * logits_for([[following]]))
    assert tree(drafter, [3], 6) == (cycle[:7], [-1, 0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("first_order", [True, False])
def test_in_an_engine_texts_are_equal_and_no_pass_is_added(first_order: bool) -> None:
    """If the newest token decides the next one, a loop is learned and accepted. Otherwise drafts are wrong."""
    transitions = torch.arange(VOCAB).expand(VOCAB, VOCAB) if first_order else None

    def target() -> AutomatonTarget:
        return AutomatonTarget(random_logits(VOCAB, VOCAB, seed=2), transitions, max_length=128)

    params = SamplingParams(temperature=0, max_new_tokens=80)
    plain = Engine(target()).generate([[1], [2, 3, 4]], params)
    handles = Engine(target(), recycling(shared=True)).generate([[1], [2, 3, 4]], params)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    assert all(a.stats.steps <= b.stats.steps for a, b in zip(handles, plain, strict=True))
    assert not first_order or min(handle.stats.tau for handle in handles) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens, depth, top_k: got 0, 6, 128; expected at least 1"),
        ({"depth": 0}, "num_draft_tokens, depth, top_k: got 12, 0"),
        ({"top_k": 0}, "num_draft_tokens, depth, top_k: got 12, 6, 0"),
        ({"min_probability": 1.5}, "min_probability: got 1.5; expected 0 to 1"),
        ({"pick": "best"}, "pick: got 'best'; expected one of coupled, greedy"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"recycling {message}"):
        recycling(**options)


def test_aux_hidden_states_are_read_of_prompts_only() -> None:
    """An auxiliary hidden state in every step would prevent compiled passes of the target."""
    assert RecyclingDrafter.needs.aux_hidden_states == () and RecyclingDrafter.needs.prompt_aux_hidden_states
    assert RecyclingDrafter().needs.prompt_aux_hidden_states == (), "nothing is read without the target's projection"

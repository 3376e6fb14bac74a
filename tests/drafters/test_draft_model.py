"""The draft-model drafter: tokens are its model's own, distributions those from which tokens were sampled."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist
from oracles.plain_decoding import plain_decode

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.adaptive.budget import acceptance_lower_bound
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget

VOCAB = 8


def automaton(seed: int = 2, vocab: int = VOCAB, **shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, vocab, seed=seed), **shape)


def drafter(model: AutomatonTarget, **settings: Any) -> Any:
    return get_drafter("draft_model")(model, **settings)


def propose(made: Any, state: DecodeState, rows: list[int], limits: list[int]) -> tuple[Draft, list[list[int]]]:
    with torch.inference_mode():
        draft = made.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check(VOCAB)
    tokens, bounds = draft.tokens.tolist(), draft.offsets.tolist()
    return draft, [tokens[a + 1 : b] for a, b in pairwise(bounds)]


def joined(made: Any, prompts: list[list[int]], **changes: Any) -> tuple[DecodeState, list[int]]:
    state = DecodeState(8, 64)
    rows = [
        state.join(prompt, SamplingParams(seed=10 + at, **changes), len(prompt), ())
        for at, prompt in enumerate(prompts)
    ]
    made.begin(state, rows, None)
    return state, rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_tokens_are_the_draft_s_own_text_for_the_seed(temperature: float) -> None:
    made = drafter(automaton())
    state, rows = joined(made, [[1, 2], [3], [4, 5, 6]], temperature=temperature)
    _, chains = propose(made, state, rows, [5, 0, 3])
    for at, (count, prompt) in enumerate([(5, [1, 2]), (0, [3]), (3, [4, 5, 6])]):
        params = SamplingParams(seed=10 + at, temperature=temperature, max_new_tokens=max(count, 1))
        assert chains[at] == plain_decode(made.model.logits_after, prompt, params)[:count]


def test_greedy_tokens_are_the_arg_max_whatever_the_temperature() -> None:
    made = drafter(automaton(), pick="greedy")
    state, rows = joined(made, [[1, 2], [3]], temperature=1.5)
    _, chains = propose(made, state, rows, [4, 4])
    for prompt, chain in zip([[1, 2], [3]], chains, strict=True):
        assert chain == plain_decode(made.model.logits_after, prompt, SamplingParams(temperature=0, max_new_tokens=4))


def test_sampled_tokens_carry_their_distributions() -> None:
    made = drafter(automaton(), pick="sampled")
    changes = {"temperature": 0.7, "top_k": 5, "top_p": 0.95}
    state, rows = joined(made, [[1, 2], [3], [4, 5, 6]], **changes)
    draft, chains = propose(made, state, rows, [2, 4, 0])
    assert draft.dists is not None and made.needs.dists
    weights = draft.dists.probs()
    for at, prompt in enumerate([[1, 2], [3], [4, 5, 6]]):
        start = int(draft.offsets[at])
        assert int(draft.dist_index[start]) == -1 and int(draft.proposal_kinds[start]) == 0
        for depth in range(len(chains[at])):
            row = int(draft.dist_index[start + 1 + depth])
            want = dist(made.model.logits_after([*prompt, *chains[at][:depth]]), **changes)
            assert np.allclose(weights[row].numpy(), want, atol=1e-6) and want[chains[at][depth]] > 0


def test_sampled_tokens_follow_their_distribution() -> None:
    """The joint distribution of two draft tokens over many seeds."""
    made = drafter(automaton(vocab=4, max_rows=500), pick="sampled")
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, 4000, 500):
        state = DecodeState(500, 64)
        rows = [state.join([1], SamplingParams(seed=start + at), 1, ()) for at in range(500)]
        made.begin(state, rows, None)
        with torch.inference_mode():
            draft = made.propose(state, rows, Budget([2] * 500), state.rng(rows))
        seen.update(tuple(pair) for pair in draft.tokens.reshape(500, 3)[:, 1:].tolist())
        made.release(rows)
    exact = {
        (one, two): dist(made.model.logits_after([1]), 1.0)[one] * dist(made.model.logits_after([1, one]), 1.0)[two]
        for one in range(4)
        for two in range(4)
    }
    assert p_value(seen, exact) > 1e-3


def test_accepted_tokens_are_not_processed_again_and_rejected_ones_are_dropped() -> None:
    made = drafter(automaton(), pick="greedy")
    state, rows = joined(made, [[1, 2]])
    _, [chain] = propose(made, state, rows, [3])
    passes = made.model.passes
    fed: list[int] = []
    extend = made.model.extend

    def spy(rows: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        fed.append(len(tokens))
        return extend(rows, tokens, *args, **kwargs)

    made.model.extend = spy
    state.append(rows, [[*chain[:2], (chain[2] + 1) % VOCAB]])  # two accepted, then another token
    _, [second] = propose(made, state, rows, [3])
    assert fed == [1, 1, 1] and made.model.passes == passes + 3
    text = list(state.tokens(0))
    assert second == plain_decode(made.model.logits_after, text, SamplingParams(temperature=0, max_new_tokens=3))
    fed.clear()
    state.append(rows, [[(second[0] + 1) % VOCAB]])  # nothing accepted
    _, [third] = propose(made, state, rows, [1])
    text = list(state.tokens(0))
    assert third == plain_decode(made.model.logits_after, text, SamplingParams(temperature=0, max_new_tokens=1))
    fed.clear()
    state.append(rows, [[*third, 5]])  # all accepted, and a bonus
    propose(made, state, rows, [1])
    assert fed == [2], "the last drafted token was never fed, so it is now, with the bonus"


def test_proposing_twice_without_new_tokens_gives_the_same() -> None:
    """After a failed step, the engine calls `propose` again."""
    for pick in ("coupled", "greedy", "sampled"):
        made = drafter(automaton(), pick=pick)
        state, rows = joined(made, [[1, 2], [5]])
        first, second = propose(made, state, rows, [3, 2])[1], propose(made, state, rows, [3, 2])[1]
        assert first == second


def test_an_empty_pool_or_a_short_context_means_no_draft() -> None:
    made = drafter(automaton(num_pages=3, page_size=4))
    state, rows = joined(made, [[1, 2, 3], [4, 5]])
    _, chains = propose(made, state, rows, [4, 4])
    assert [len(chain) for chain in chains] == [4, 0]
    made = drafter(automaton(max_length=6))
    state, rows = joined(made, [[1, 2, 3]])
    assert [len(propose(made, state, rows, [limit])[1][0]) for limit in (3, 4)] == [3, 0]


def test_minimum_lengths_hold_for_the_draft_too() -> None:
    ends = (1, 2, 3, 4, 5)
    for pick in ("coupled", "greedy", "sampled"):
        made = drafter(automaton(), pick=pick)
        state = DecodeState(2, 32)
        rows = [state.join([1, 2], SamplingParams(seed=1, min_new_tokens=4), 2, ends)]
        made.begin(state, rows, None)
        assert not set(propose(made, state, rows, [4])[1][0]) & set(ends)


def test_vocabularies_of_different_sizes() -> None:
    """A draft with padding is cut to the target's ids. Ids unknown to the draft are replaced."""
    params = [SamplingParams(seed=seed, max_new_tokens=20) for seed in range(4)]
    prompts = [[1, 7], [7, 7, 3], [0], [6, 7]]
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, params)]
    for vocab in (6, 12):
        for rule, pick in (("replay", "coupled"), ("rejection", "sampled")):
            made = drafter(automaton(vocab=vocab), pick=pick, vocab_size=VOCAB)
            handles = Engine(automaton(), made, rule=rule).generate(prompts, params)
            assert [handle.error for handle in handles] == [None] * 4
            if rule == "replay":
                assert [handle.tokens for handle in handles] == want
            assert made.model.cache.pages.num_used == 0
    small = HuggingFaceTarget(models.own("llama"), max_length=64)
    padded = get_drafter("draft_model")(small, vocab_size=90)
    handle = Engine(HuggingFaceTarget(models.own("llama"), max_length=64, vocab_size=90), padded).generate(
        [models.prompt(5, vocab=90)], SamplingParams(temperature=1.5, seed=1, max_new_tokens=30)
    )[0]
    assert len(handle.tokens) == 30 and max(handle.tokens) < 90 and handle.stats.alpha == 1.0


@pytest.mark.parametrize("name", ["draft_model", "draft_tree", "forest"])
def test_a_wider_draft_without_the_target_s_vocab_size_is_refused(name: str) -> None:
    wide = automaton(vocab=12)
    given = [get_drafter("draft_model")(wide)] * 2 if name == "forest" else wide
    made = get_drafter(name)(given)
    words = f"drafter {name}: got a draft model of 12 token ids, the target has {VOCAB}; .*vocab_size={VOCAB}.*'tli' or"
    with pytest.raises(ValueError, match=words):
        Engine(automaton(), made)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, "draft_model num_draft_tokens: got 0; expected at least 1"),
        ({"pick": "best"}, "draft_model pick: got 'best'; expected one of coupled, sampled, greedy"),
    ],
)
def test_bad_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter(automaton(), **settings)


@pytest.mark.parametrize("pick", ["sampled", "coupled"])
def test_the_entropy_stop_ends_a_chain_before_an_uncertain_token_and_changes_nothing_before_it(pick: str) -> None:
    """Bounds are recomputed from the table. The tokens equal those of a drafter without a stop."""
    model = automaton()
    state = DecodeState(6, 64)
    prompts = [[1], [2, 3], [4, 4, 1], [0, 7], [5], [6, 1, 1, 2]]
    rows = [state.join(prompt, SamplingParams(seed=9), len(prompt), ()) for prompt in prompts]
    free, stopped = drafter(model, pick=pick), drafter(automaton(), pick=pick, entropy_stop=0.45)
    for made in (free, stopped):
        made.begin(state, rows, None)
    _, whole = propose(free, state, rows, [6] * 6)
    _, cut = propose(stopped, state, rows, [6] * 6)
    for prompt, long, short in zip(prompts, whole, cut, strict=True):
        bounds = []
        for count in range(6):
            q = np.exp(model.logits_after([*prompt, *long[:count]]))
            q /= q.sum()
            bounds.append(1 - np.sqrt(-0.2 * (q * np.log(q)).sum()))
        sure = next((at for at, bound in enumerate(bounds) if bound < 0.45), 6)
        assert short == long[:sure]
    assert 0 < sum(map(len, cut)) < sum(map(len, whole))
    with pytest.raises(ValueError, match=r"entropy_stop: got 1.0; expected a number in \[0, 1\); 0 is off"):
        drafter(model, entropy_stop=1.0)
    for stop, goal in ((0.0, 0.9), (0.3, 1.5), (0.3, -0.1)):
        message = rf"entropy_goal: got {goal} with entropy_stop {stop}; expected a number in \[0, 1\], and above 0"
        with pytest.raises(ValueError, match=message):
            drafter(model, entropy_stop=stop, entropy_goal=goal)


@pytest.mark.parametrize("pick", ["sampled", "coupled"])
def test_an_entropy_goal_adapts_each_request_s_stop(pick: str) -> None:
    """Rates and thresholds equal a simple computation, and every chain ends at its own threshold."""
    model = AutomatonTarget(random_logits(23, VOCAB, seed=2) + 0.4 * random_logits(23, VOCAB, seed=3), max_rows=3)
    made = drafter(model, pick=pick, num_draft_tokens=4, entropy_stop=0.4, entropy_goal=0.6)
    engine = Engine(automaton(max_rows=3), made, rule="rejection" if pick == "sampled" else "replay")
    handles = [engine.submit([at, 2], SamplingParams(seed=19 + at, max_new_tokens=25 + 9 * at)) for at in range(3)]
    rates, thresholds, moves, ends = [0.0] * 3, [0.4] * 3, set(), set()
    while not engine.idle:
        before = [(sum(own.stats.accepted_per_position), [*own.prompt, *own.tokens], own.remaining) for own in handles]
        engine.step()
        draft = made._last[0]
        chains = dict(zip(draft.rows.tolist(), (part.tolist() for part in draft.tokens.split(draft.counts))))
        for at, (own, (accepted, text, remaining)) in enumerate(zip(handles, before, strict=True)):
            if own.row is None:
                continue
            chain, longest = chains[own.row][1:], min(4, remaining - 1)
            for level in range(1, min(len(chain) + 1, longest)):
                bound = float(
                    acceptance_lower_bound(model.table[[model.state_after(text + chain[:level])]], torch.ones(1))
                )
                assert (bound >= thresholds[at]) == (level < len(chain))
            ends.add(len(chain))
            accepted = sum(own.stats.accepted_per_position) - accepted
            if longest:
                rates[at] = rates[at] / 2 + accepted / len(chain) / 2
                move = 0.01 if rates[at] < 0.6 else 0.0 if accepted == longest else -0.01
                thresholds[at] = 0.9 * thresholds[at] + 0.1 * (thresholds[at] + move)
                moves.add(move)
            found = made._thresholds[own.row]
            assert (found.rate, found.threshold) == (pytest.approx(rates[at]), pytest.approx(thresholds[at]))
    assert moves == {0.01, 0.0, -0.01} and ends >= {1, 2, 4} and not made._thresholds


def test_an_entropy_stop_above_every_distribution_still_drafts_one_token() -> None:
    made = drafter(automaton(), num_draft_tokens=4, entropy_stop=0.99, entropy_goal=0.9)
    handle = Engine(automaton(), made).generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=20))[0]
    assert handle.stats.steps - 1 <= handle.stats.num_draft_tokens <= handle.stats.steps, (
        "one token a step, none in the last"
    )


@pytest.mark.parametrize(("pick", "rule"), [("sampled", "rejection"), ("coupled", "replay"), ("greedy", "replay")])
def test_drafts_of_nan_are_faults_of_their_request_alone(pick: str, rule: str, faults: Any) -> None:
    table = random_logits(23, VOCAB, seed=3)
    clean = AutomatonTarget(table.clone(), max_rows=2)
    bad = clean.state_after([1, 2])
    table[bad] = torch.nan  # the first draft of the first request meets this state
    prompts, own = [[1, 2], [4]], SamplingParams(seed=2, max_new_tokens=12)
    plain = Engine(automaton()).generate(prompts, own)
    engine = Engine(automaton(), drafter(AutomatonTarget(table, max_rows=2), pick=pick), rule=rule)
    first, second = engine.generate(prompts, own)
    assert [first.error, second.error] == [None, None]
    assert first.stats.faults > 0
    healthy = Engine(automaton(), drafter(clean, pick=pick), rule=rule)
    if rule == "replay":
        assert [first.tokens, second.tokens] == [handle.tokens for handle in plain]
    assert healthy.generate(prompts, own)[0].stats.faults == 0

"""Jacobi decoding: iterations, prefixes, blocks, horizons and fills. The contract suite tests its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits, scripted

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.drafters import make_drafter
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput

VOCAB, LENGTH = 8, 24


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, VOCAB, seed=2), **{"max_length": 64, **shape})


def run(made: Any, temperature: float = 0.0, length: int = LENGTH, **changes: Any) -> Handle:
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=length, **changes)
    return Engine(target(), made, eos_token_ids=(3,)).generate([[1, 2]], params)[0]


def plain(temperature: float, length: int = LENGTH, **changes: Any) -> list[int]:
    return run(None, temperature, length, ignore_eos=True, **changes).tokens


def drafter(**options: Any) -> Any:
    return get_drafter("jacobi")(**{"num_draft_tokens": LENGTH, **options})


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_no_fill_needs_more_passes_than_tokens(temperature: float) -> None:
    want = plain(temperature)
    wrong = [(token + 1) % VOCAB for token in want]
    fills: list[Any] = [None, *range(VOCAB), lambda text, count: [wrong[(len(text) - 2) % LENGTH]] * count]
    for fill in fills:
        handle = run(drafter(fill=fill), temperature, ignore_eos=True)
        assert handle.tokens == want and handle.stats.steps <= LENGTH


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block", [None, 1, 2, 5, LENGTH])
def test_the_right_fill_needs_one_pass_per_block(temperature: float, block: int | None) -> None:
    want = plain(temperature)
    handle = run(drafter(fill=lambda text, count: want[len(text) - 2 :], block=block), temperature, ignore_eos=True)
    assert handle.tokens == want and handle.stats.steps == -(-LENGTH // (block or LENGTH))


def test_after_k_passes_the_first_k_tokens_are_final_and_the_tail_is_the_next_iterate() -> None:
    """Against the published iteration: y(k)_i = choice(y(k-1)_<i), from one fill, without a cache."""
    model, prompt, size = target(), [1, 2], 12
    guess, want = [0] * size, plain(0.0, size)
    made = drafter(fill=0, block=size)
    engine = Engine(model, made)
    handle = engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=size, ignore_eos=True))
    fixed = 0
    while not handle.finished:
        guess = [int(model.logits_after([*prompt, *guess[:at]]).argmax()) for at in range(size)]
        fixed += 1
        engine.step()
        assert handle.tokens[:fixed] == want[: min(fixed, len(handle.tokens))] and len(handle.tokens) >= fixed
        if not handle.finished:
            assert [*handle.tokens, *made._rows[0].guess] == guess
    assert handle.tokens == want == guess


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_block_is_pj_and_blocks_of_one_are_plain_decoding(temperature: float) -> None:
    def passes(**options: Any) -> int:
        return run(drafter(**options), temperature, ignore_eos=True).stats.steps

    assert passes(block=1) == LENGTH
    assert passes(block=LENGTH) == passes() <= LENGTH
    assert passes(block=LENGTH, horizon=LENGTH) == passes(horizon=10**6) == passes()
    assert passes(horizon=1) == LENGTH


def test_guesses_end_with_block_and_horizon() -> None:
    made = drafter(block=5, horizon=12)
    state = DecodeState(1, 64)
    row = state.join([1, 2, 4], SamplingParams(seed=1), 3, ())
    made.begin(state, [row], None)
    sizes = []
    for _ in range(14):
        sizes.append(made.propose(state, [row], Budget([9]), state.rng([row])).counts[0] - 1)
        state.append([row], [[6]])
    assert sizes == [4, 3, 2, 1, 0, 4, 3, 2, 1, 0, 1, 0, 0, 0]
    state.append([row], [[7]])
    assert made.propose(state, [row], Budget([9]), state.rng([row])).counts == (1,)


def test_a_request_that_joins_again_continues_its_block_and_keeps_its_horizon() -> None:
    """After a preemption, blocks and horizon count from the prompt, not from the text at its return."""
    made, sizes = drafter(block=5, horizon=12), []
    for generated in range(14):
        state = DecodeState(1, 64)
        row = state.join([1, 2, 4, *[6] * generated], SamplingParams(seed=1), 3, ())
        made.begin(state, [row], None)
        sizes.append(made.propose(state, [row], Budget([9]), state.rng([row])).counts[0] - 1)
    assert sizes == [4, 3, 2, 1, 0, 4, 3, 2, 1, 0, 1, 0, 0, 0]


def test_a_stop_inside_a_guess_that_is_not_final_is_no_stop() -> None:
    """The fill is the end-of-sequence token, and the text does not end early."""
    want = run(None).tokens
    assert run(drafter(fill=3)).tokens == want and want.count(3) <= 1


def test_the_kept_tail_helps_if_choices_do_not_depend_on_earlier_tokens() -> None:
    """The target's token depends on its position alone, so the second pass is right everywhere."""
    script = [1, 4, 2, 5, 7, 6, 0, 3, 2, 1, 6, 4]
    engine = Engine(scripted(script, VOCAB, max_rows=1, max_length=32), drafter(fill=0, num_draft_tokens=11))
    handle = engine.generate([[1]], SamplingParams(temperature=0, max_new_tokens=11))[0]
    assert handle.tokens == script[1:] and handle.stats.steps == 2


def test_rules_without_choices_use_the_arg_max_as_the_next_guess() -> None:
    for rule in ("rejection", "block", "recursive_rejection"):
        made = drafter(num_draft_tokens=6)
        engine = Engine(target(), made, rule=rule)
        handle = engine.submit([1, 2], SamplingParams(seed=3, max_new_tokens=LENGTH))
        seen = 0
        while not handle.finished:
            before = [*handle.prompt, *handle.tokens]
            last = made._rows[0].guess if made._rows else []
            engine.step()
            if handle.finished:
                break
            guess, text = made._rows[0].guess, [*handle.prompt, *handle.tokens]
            drafted = [*last, *[before[-1]] * 6][:6]
            for at, token in enumerate(guess):
                prefix = [*before, *drafted][: len(text) + at]
                assert token == int(engine.target.logits_after(prefix).argmax())
                seen += 1
        assert handle.error is None and seen > 10


def test_over_a_transformers_model() -> None:
    for block in (None, 3):
        engine = Engine(models.target("llama"), get_drafter("jacobi")(block=block))
        handles = engine.generate(
            [models.prompt(17), models.prompt(5)], SamplingParams(temperature=0, max_new_tokens=20)
        )
        assert [handle.tokens for handle in handles] == [models.greedy_text("llama", n, 20) for n in (17, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block: got 0; expected a whole number of at least 1, or none"),
        ({"block": 2.5}, "block: got 2.5"),
        ({"horizon": -1}, "horizon: got -1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0"),
        ({"fill": "pad"}, "fill: got 'pad'; expected a token id"),
        ({"fill": VOCAB}, r"fill: got token id 8; expected 0\.\.7"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^drafter jacobi: {message}"):
        make_drafter("jacobi", options, target=target())


def test_a_draft_of_another_drafter_is_ignored() -> None:
    made, other = drafter(), drafter(fill=2)
    state = DecodeState(1, 64)
    row = state.join([1, 2, 4], SamplingParams(seed=1), 3, ())
    for each in (made, other):
        each.begin(state, [row], None)
    made.propose(state, [row], Budget([4]), state.rng([row]))
    foreign = other.propose(state, [row], Budget([4]), state.rng([row]))
    choice = torch.arange(foreign.num_nodes)
    path, nothing = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    made.observe(state, foreign, Acceptance(path, nothing, choice[:1], choice), TargetOutput(None))
    assert made._rows[row].guess == []
    other.observe(state, foreign, Acceptance(path, nothing, choice[:1], choice), TargetOutput(None))
    assert other._rows[row].guess == [1, 2, 3, 4]

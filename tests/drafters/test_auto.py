"""Drafter `auto` scores the nodes that pay, learns from proposals that were not scored, and never changes a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.adaptive.cost_model import TimeTable, survival
from specdec_fast.core.draft import Draft

VOCAB = 8


class Guesses:
    """Proposes what a function says for each text, cut to the budget, with a fixed confidence."""

    name, level_rates = "guesses", (0.5, 0.5)

    def __init__(self, guess: Any, level: int = 0) -> None:
        self.guess, self.level, self.confidence = guess, level, [level]
        self.limits: list[int] = []

    def begin(self, *args: Any) -> None:
        pass

    def grow_trees(self, view: Any, rows: Any, limits: Any, rng: Any) -> list[Any]:
        self.limits, self.confidence = list(limits), [self.level] * len(rows)
        trees = []
        for row, limit in zip(rows, limits, strict=True):
            tokens = list(self.guess(list(view.tokens(row))))[:limit]
            trees.append(([view.tokens(row)[-1], *tokens], [-1, *range(len(tokens))]))
        return trees

    def observe(self, *args: Any) -> None:
        pass

    def release(self, rows: Any) -> None:
        pass

    def forget(self) -> None:
        pass


def target() -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, VOCAB, seed=2))


def times(*seconds: float) -> TimeTable:
    """Seconds of passes with 1, 4 and 16 nodes."""
    known = dict(zip((1, 4, 16), seconds, strict=True))
    return TimeTable(slowdown_rate=0.0, seconds=known, keys=sorted(known))


class Constant(TimeTable):
    """Seconds that no measurement changes."""

    def add(self, number: int, seconds: float) -> None:
        pass


def auto(*sources: Any, pass_times: TimeTable, **options: Any) -> Any:
    made = get_drafter("auto")(sources, **options)
    made.pass_times = Constant(prior=pass_times)
    return made


def texts_after(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of plain decoding."""
    return list(Engine(target()).generate([prompt], SamplingParams(temperature=0, max_new_tokens=count))[0].tokens)


PROMPT = [1, 2, 3]
TEXT = [*PROMPT, *texts_after(PROMPT, 40)]


def oracle(text: list[int]) -> list[int]:
    return TEXT[len(text) : len(text) + 6]


def wrong(text: list[int]) -> list[int]:
    return [(TEXT[len(text)] + 1) % VOCAB, 0, 0] if len(text) < len(TEXT) else []


def run(made: Any, count: int = 30) -> Any:
    handle = Engine(target(), made).generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=count))[0]
    assert handle.error is None and handle.stats.faults == 0
    assert [*PROMPT, *handle.tokens] == TEXT[: len(PROMPT) + count]
    return handle


def test_flat_times_score_everything_and_steep_times_nothing() -> None:
    assert run(auto(Guesses(oracle), pass_times=times(1.0, 1.0, 1.0))).stats.tau > 4
    steep = run(auto(Guesses(oracle), pass_times=times(1.0, 8.0, 40.0)))
    assert steep.stats.num_draft_tokens == 0 and steep.stats.steps == 30


def first_rate(made: Any, level: int) -> float:
    """What the drafter knows of the first token of proposals of a level."""
    return survival(made._accepted[0, level], 1, made.sources[0].level_rates[level])[0]


def test_acceptance_is_learned_from_proposals_that_were_not_scored() -> None:
    """A proposal with a low prior is not scored until the text has shown that it is right."""
    source = Guesses(oracle)
    source.level_rates = (0.05,)
    made = auto(source, pass_times=times(1.0, 1.9, 5.0))
    handle = run(made)
    assert handle.stats.num_draft_tokens > 0 and handle.stats.tau > 1.3, "it was right every time"
    accepted = first_rate(made, 0)
    assert accepted > 0.7


def test_a_proposal_that_is_never_right_is_dropped_soon() -> None:
    handle = run(auto(Guesses(wrong), pass_times=times(1.0, 1.4, 2.2)))
    assert 0 < handle.stats.num_draft_tokens <= 24 and handle.stats.tau == 1.0
    last = handle.stats.num_draft_tokens
    assert run(auto(Guesses(wrong), pass_times=times(1.0, 1.4, 2.2)), 37).stats.num_draft_tokens == last


def test_levels_of_confidence_are_told_apart() -> None:
    """One source is right where it is confident and wrong elsewhere; only the confident proposals stay."""

    class Mixed(Guesses):
        def grow_trees(self, view: Any, rows: Any, limits: Any, rng: Any) -> list[Any]:
            self.level = len(view.tokens(rows[0])) % 2
            self.guess = oracle if self.level else wrong
            return super().grow_trees(view, rows, limits, rng)

    made = auto(Mixed(oracle), pass_times=times(1.0, 1.4, 2.2))
    run(made)
    assert first_rate(made, 1) > 0.7 > 0.2 > first_rate(made, 0)


def test_two_sources_share_the_nodes_of_a_row() -> None:
    made = auto(Guesses(oracle), Guesses(wrong), pass_times=times(1.0, 1.0, 1.0), num_draft_tokens=4)
    engine = Engine(target(), made)
    counts: list[int] = []
    propose = made.propose

    def watched(*args: Any) -> Draft:
        draft = propose(*args)
        counts.extend(count - 1 for count in draft.counts)
        return draft

    made.propose = watched
    engine.generate([PROMPT, PROMPT[:2]], SamplingParams(temperature=0, max_new_tokens=20), num_draft_tokens=4)
    assert max(counts) == 4 and made.sources[0].limits[-1] <= 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_equal_those_of_plain_decoding(temperature: float) -> None:
    plain, made = (load("demo-target", drafter=name, max_length=256) for name in ("none", "auto"))
    made.drafter.pass_times.prior = None  # a busy machine would decide what is scored
    prompts = ["And it came to pass", "def add(first, second):\n    return first + second\n\ndef", "import os\nimport"]
    params = [SamplingParams(temperature=temperature, seed=seed, max_new_tokens=40) for seed in range(3)]
    want, got = plain.generate(prompts, params), made.generate(prompts, params)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert sum(one.stats.num_draft_tokens for one in got) > 0 and not any(one.stats.faults for one in got)


def test_it_refuses_bad_options() -> None:
    with pytest.raises(ValueError, match=r"auto of: got .*; expected drafters"):
        get_drafter("auto")()
    with pytest.raises(ValueError, match=r"auto of: got ngram, which states no confidence"):
        get_drafter("auto")([get_drafter("ngram")()])
    with pytest.raises(ValueError, match=r"auto: num_draft_tokens: got 0; expected at least 1"):
        load("demo-target", drafter="auto", num_draft_tokens=0)


class Counted(Guesses):
    """Counts its calls, and expects little."""

    level_rates, calls = (0.01, 0.01), 0

    def grow_trees(self, *args: Any) -> list[Any]:
        self.calls += 1
        return super().grow_trees(*args)


def test_a_source_that_may_rest_pauses_while_it_saves_nothing() -> None:
    idle, kept = Counted(wrong), Counted(wrong)
    idle.may_rest = True  # type: ignore[attr-defined]
    handle = run(auto(idle, kept, pass_times=times(1.0, 2.0, 8.0)), count=37)
    drafting = handle.stats.steps - 1  # the last token needs no draft
    assert kept.calls == drafting == 36 and idle.calls == 16


def test_a_source_that_saves_time_never_pauses() -> None:
    useful = Counted(oracle)
    useful.level_rates = (0.5, 0.5)
    useful.may_rest = True  # type: ignore[attr-defined]
    handle = run(auto(useful, pass_times=times(1.0, 1.0, 1.0)))
    assert handle.stats.steps - 1 <= useful.calls <= handle.stats.steps and handle.stats.tau > 2


def test_a_pausing_source_is_woken_where_it_says_so() -> None:
    """Pauses of the first window: the 16 steps after 8. The source is asked in one of four, and takes part in two."""
    idle, asked = Counted(wrong), []

    def ends_rest(view: Any, rows: Any) -> bool:
        asked.append(len(view.tokens(rows[0])) - len(PROMPT))
        return len(asked) in (1, 3)

    idle.may_rest, idle.ends_rest = True, ends_rest  # type: ignore[attr-defined]
    run(auto(idle, pass_times=times(1.0, 2.0, 8.0)), count=24)
    assert asked == [11, 15, 19] and idle.calls == 8 + 2


def test_a_step_in_which_all_sources_rest_is_a_plain_one() -> None:
    """Nothing is asked, joined or learned in it. The time of one in four counts as that of a plain pass."""
    idle, timed, granted = Counted(wrong), [], []
    idle.may_rest = True  # type: ignore[attr-defined]
    made = auto(idle, pass_times=times(1.0, 2.0, 8.0))
    made.pass_times.add, grant = lambda number, seconds: timed.append(number), made._grant
    made._grant = lambda limits: granted.append(limits) or grant(limits)
    run(made, count=20)
    assert len(granted) == idle.calls == 8 and timed == [1] * (8 + 11 // 4)


def test_a_step_without_proposals_is_a_plain_one() -> None:
    """The engine makes its draft. The sources still observe it."""

    class Silent(Counted):
        seen = 0

        def grow_trees(self, view: Any, rows: Any, limits: Any, rng: Any) -> Any:
            trees = super().grow_trees(view, rows, limits, rng)
            return [(tokens[:1], parents[:1]) for tokens, parents in trees]

        def observe(self, *given: Any) -> None:
            self.seen += 1

    silent, granted, proposed = Silent(oracle), [], []
    made = auto(silent, pass_times=times(1.0, 1.0, 1.0))
    propose = made.propose
    made._grant = granted.append
    made.propose = lambda *given: proposed.append(propose(*given)) or proposed[-1]
    steps = run(made, count=10).stats.steps
    assert proposed == [None] * (steps - 1) and granted == [] and silent.seen == steps


def test_a_resting_source_that_can_be_woken_observes_one_step_in_four() -> None:
    """It sees the last step of a text of full length too, so its memory has the end of the text."""
    idle, seen = Counted(wrong), []
    idle.may_rest, idle.ends_rest = True, lambda view, rows: False  # type: ignore[attr-defined]
    idle.observe = lambda view, *given: seen.append(view.length(0) - len(PROMPT))  # type: ignore[method-assign]
    run(auto(idle, pass_times=times(1.0, 2.0, 8.0)), count=20)
    assert idle.calls == 8 and seen == [*range(1, 9), 12, 16, 20]


@pytest.mark.parametrize("rows", [1, 2])
def test_sources_catch_up_before_a_row_leaves(rows: int) -> None:
    """A text may end in a step that they have not seen, as at an end of sequence or when a client leaves."""
    idle, known = Counted(wrong), {}
    idle.may_rest, idle.ends_rest = True, lambda view, rows: False  # type: ignore[attr-defined]
    idle.catch_up = lambda view, rows: known.update({row: list(view.tokens(row)) for row in rows})  # type: ignore[attr-defined]
    released = []
    idle.release = lambda rows: released.extend((row, known.get(row)) for row in rows)  # type: ignore[method-assign]
    engine = Engine(target(), auto(idle, pass_times=times(1.0, 2.0, 8.0)))
    handles = [engine.submit(PROMPT, SamplingParams(temperature=0, max_new_tokens=40)) for _ in range(rows)]
    for _ in range(14):
        engine.step()
    for handle in handles:
        engine.cancel(handle)
    assert released == [(row, [*PROMPT, *handle.tokens]) for row, handle in enumerate(handles)]


def test_what_a_failed_step_left_is_not_learned() -> None:
    """A step that proposes nothing follows one that was never observed."""
    made, learned = auto(Counted(oracle), pass_times=times(1.0, 1.0, 1.0)), []
    made._learn = lambda *given: learned.append(made._proposals)
    engine = Engine(target(), made)
    handle = engine.submit(PROMPT, SamplingParams(temperature=0, max_new_tokens=6))
    score, fails = engine.target.score, [True]

    def failing(*given: Any) -> Any:
        if fails and fails.pop():
            made.sources[0].guess = lambda text: []
            raise RuntimeError("the pass failed")
        return score(*given)

    engine.target.score = failing  # type: ignore[method-assign]
    while not handle.finished:
        try:
            engine.step()
        except RuntimeError:
            continue
    assert not fails and learned == []


def test_pauses_end_with_the_last_request() -> None:
    idle = Counted(wrong)
    idle.may_rest = True  # type: ignore[attr-defined]
    made = auto(idle, pass_times=times(1.0, 2.0, 8.0))
    engine = Engine(target(), made)
    first = engine.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=12))[0]
    assert idle.calls == 8 < first.stats.steps - 1
    engine.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=5))
    assert idle.calls == 12


def test_without_known_times_nothing_pauses() -> None:
    idle = Counted(wrong)
    idle.may_rest = True  # type: ignore[attr-defined]
    steps = run(get_drafter("auto")((idle,))).stats.steps
    assert idle.calls == steps - 1

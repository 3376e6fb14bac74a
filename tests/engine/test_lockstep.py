"""Engines in lockstep, as threads in place of processes: equal seeds, and every difference is an error on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain
from oracles.threads import together

from specdec_fast import Draft, Engine, SamplingParams
from specdec_fast.adaptive.budget import Fixed
from specdec_fast.core.ranks import Ranks, RanksError
from specdec_fast.drafters import get_drafter
from specdec_fast.engine import lockstep

PROMPTS = [[1, 2, 3], [4, 5]]


class Exchange:
    """What two threads tell each other in place of a process group."""

    def __init__(self) -> None:
        self.barrier, self.table, self.calls = threading.Barrier(2, timeout=20), [[], []], 0


class ThreadRanks(Ranks):
    """The ranks of threads."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.size, self.rank, self._lost, self._exchange = 2, rank, None, exchange

    def gather(self, numbers: list[int]) -> list[list[int]]:
        self._exchange.table[self.rank] = numbers
        self._exchange.barrier.wait()
        found = [list(each) for each in self._exchange.table]
        if self.rank == 0:
            self._exchange.calls += 1
        self._exchange.barrier.wait()
        return found


def engine(rank: int, exchange: Exchange, drafter: Any = None, **options: Any) -> Engine:
    target = AutomatonTarget(random_logits(23, 16, seed=2), page_size=4, max_rows=2)
    target.ranks = ThreadRanks(rank, exchange)
    return Engine(target, drafter, **options)


def on_both(run: Callable[[int, Exchange], Any]) -> list[Any]:
    """Runs a function on two ranks. Returns their results, or what they raised."""
    exchange = Exchange()
    return together(*(lambda rank=rank: run(rank, exchange) for rank in range(2)))  # type: ignore[misc]


def chain(rank: int = 0) -> NoisyChain:
    wanted = [[*each, *range(3, 16)] for each in PROMPTS]
    return NoisyChain(wanted, 0.7, 4)


def test_unseeded_requests_have_the_same_seeds_everywhere_and_others_in_the_next_run() -> None:
    def run(rank: int, exchange: Exchange) -> Any:
        own = engine(rank, exchange, chain())
        texts = [*own.generate(PROMPTS, SamplingParams(max_new_tokens=20)), *own.generate(PROMPTS)]
        return [(each.params.seed, each.tokens) for each in texts]

    first, second = on_both(run)
    assert first == second and len({seed for seed, _ in first}) == 4
    assert not {seed for seed, _ in first} & {seed for seed, _ in on_both(run)[0]}


def test_a_seed_of_the_caller_stays() -> None:
    def run(rank: int, exchange: Exchange) -> Any:
        return engine(rank, exchange).generate(PROMPTS, SamplingParams(seed=5, max_new_tokens=9))

    alone = Engine(AutomatonTarget(random_logits(23, 16, seed=2))).generate(
        PROMPTS, SamplingParams(seed=5, max_new_tokens=9)
    )
    for own in on_both(run):
        assert [(each.params.seed, each.tokens) for each in own] == [(5, each.tokens) for each in alone]


class RaisesOn:
    """A logits processor that fails in one process."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if self.fails:
            raise KeyError("one process alone")
        return logits


class OtherDrafts(NoisyChain):
    """Drafts something else in one process."""

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        return Draft.chains(
            rows, [[view.tokens(row)[-1], 7][: 1 + min(budget.nodes)] for row in rows], device=view.device
        )


def other_order(own: Engine, rank: int) -> None:
    own.generate(PROMPTS if rank else PROMPTS[::-1], SamplingParams(seed=1, max_new_tokens=9))


def other_prompt(own: Engine, rank: int) -> None:
    own.generate([[1, 2 + rank]], SamplingParams(seed=1, max_new_tokens=9))


def other_params(own: Engine, rank: int) -> None:
    own.generate([[1, 2]], SamplingParams(seed=1, top_k=3 + rank, max_new_tokens=9))


def other_salt(own: Engine, rank: int) -> None:
    own.submit([1, 2], SamplingParams(max_new_tokens=9), cache_salt=str(rank))
    own.step()


def one_cancels(own: Engine, rank: int) -> None:
    handle = own.submit([1, 2], SamplingParams(max_new_tokens=9))
    own.step()
    if rank:
        own.cancel(handle)
    own.step()


def one_submits_nothing(own: Engine, rank: int) -> None:
    if rank:
        own.submit([1, 2], SamplingParams(max_new_tokens=9))
    own.step()


def one_fails(own: Engine, rank: int) -> None:
    own.generate([[1, 2]], SamplingParams(seed=1, logits_processors=(RaisesOn(rank == 1),), max_new_tokens=9))


def other_tokens(own: Engine, rank: int) -> None:
    biased = SamplingParams(seed=1, logits_processors=(lambda tokens, logits: logits.roll(rank, -1),), max_new_tokens=2)
    own.generate([[1, 2]], biased)


def other_pages(own: Engine, rank: int) -> None:
    own.submit([1, 2], SamplingParams(max_new_tokens=9))
    own.step()
    if rank:
        own.target.cache.pages._free.pop()
    own.step()


@pytest.mark.parametrize(
    ("calls", "fact"),
    [
        (other_order, "its requests"),
        (other_prompt, "its requests"),
        (other_params, "its requests"),
        (other_salt, "its requests"),
        (one_cancels, "its requests"),
        (one_submits_nothing, "its requests"),
        (one_fails, "its requests"),
        (other_tokens, "its texts"),
        (other_pages, "the free pages of its cache"),
    ],
)
def test_a_difference_is_an_error_everywhere_and_engines_go_on(calls: Callable[[Engine, int], None], fact: str) -> None:
    def run(rank: int, exchange: Exchange) -> Any:
        own = engine(rank, exchange)
        with pytest.raises(RanksError) as error:
            calls(own, rank)
        for each in own._unfinished():
            own.cancel(each)
        if "pages" in fact:
            return str(error.value), None
        after = own.generate([[3, 4]], SamplingParams(seed=3, max_new_tokens=9))
        return str(error.value), [each.tokens for each in after]

    first, second = on_both(run)
    assert first == second, (first, second)
    assert (
        f"process 1 of 2 differs from process 0 in {fact}; expected the same" in first[0]
        and "; run the same" in first[0]
    )


def test_other_drafts_are_found_before_they_are_scored() -> None:
    scored = []

    class Counting(AutomatonTarget):
        def score(self, *arguments: Any, **more: Any) -> Any:
            scored.append(1)
            return super().score(*arguments, **more)

    def run(rank: int, exchange: Exchange) -> Any:
        target = Counting(random_logits(23, 16, seed=2))
        target.ranks = ThreadRanks(rank, exchange)
        drafter = (OtherDrafts if rank else NoisyChain)([[*PROMPTS[0], *range(3, 16)]], 1.0, 1)
        return Engine(target, drafter).generate(PROMPTS[:1], SamplingParams(seed=1, max_new_tokens=9))

    for found in on_both(run):
        assert isinstance(found, RanksError) and "differs from process 0 in its drafts" in str(found), found
    assert not scored


@pytest.mark.parametrize(
    "options", [{"rule": "greedy"}, {"prefill_chunk": 7}, {"eos_token_ids": 3}, {"budget": Fixed()}]
)
def test_other_settings_are_refused_when_engines_are_made(options: dict[str, Any]) -> None:
    other_drafts = {"drafter": get_drafter("ngram")(num_draft_tokens=3)} if "budget" in options else {}

    def run(rank: int, exchange: Exchange) -> Any:
        return engine(rank, exchange, **({**options, **other_drafts} if rank else {}))

    for found in on_both(run):
        assert isinstance(found, RanksError) and "differs from process 0 in the settings of its engine" in str(found), (
            found
        )


class Clocked(Fixed):
    name = "clocked"
    follows_clock = True


@pytest.mark.parametrize(
    ("drafter", "budget", "message"),
    [
        (None, "goodput", "budget: got 'goodput', which follows measured times.* use fixed"),
        (None, Clocked(), "budget: got 'clocked'"),
        ("auto", "fixed", "drafter: got 'auto', which follows measured times.* use suffix, recycling"),
        ("forest", "fixed", "drafter: got 'forest', which follows measured times"),
    ],
)
def test_what_follows_a_clock_is_refused(drafter: str | None, budget: Any, message: str) -> None:
    made = None
    if drafter is not None:
        made = get_drafter("auto")([get_drafter("suffix")()])
        made = get_drafter("forest")([made, get_drafter("ngram")()]) if drafter == "forest" else made
    with pytest.raises(ValueError, match=message):
        engine(0, Exchange(), made, budget=budget)


def test_no_step_is_captured_and_no_drafter_is_timed() -> None:
    def run(rank: int, exchange: Exchange) -> Any:
        return engine(rank, exchange, chain(), step_mode="graph")

    for own in on_both(run):
        assert own.step_mode == "sync" and "2 processes compute the model" in own.explain(), own.explain()
        assert own._drafter_speed._done


def test_a_step_compares_twice_and_once_more_before_it_prefills() -> None:
    def run(rank: int, exchange: Exchange) -> Any:
        own = engine(rank, exchange)
        own.submit([1, 2, 3], SamplingParams(seed=1, max_new_tokens=9, ignore_eos=True))
        counts = []
        for _ in range(3):
            before = exchange.calls
            own.step()
            counts.append(exchange.calls - before)
        return counts

    assert on_both(run)[0] == [3, 2, 2]


def test_a_target_of_one_process_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_checksum", None)
    own = Engine(AutomatonTarget(random_logits(23, 16, seed=2)), chain(), budget="goodput")
    handles = own.generate(PROMPTS, SamplingParams(max_new_tokens=9))
    assert own._lockstep.ranks is None and handles[0].params.seed != handles[1].params.seed


def test_a_lost_process_is_named_once_and_nothing_waits_again() -> None:
    ranks = ThreadRanks(0, Exchange())
    with pytest.raises(
        RanksError, match=r"process 0 of 2 lost another one.*Connection closed.*start all of them again"
    ):
        with ranks.naming_lost_ranks():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    with pytest.raises(RanksError, match="lost another one"), ranks.naming_lost_ranks():
        raise AssertionError("not reached")
    other = ThreadRanks(1, Exchange())
    for words in ("shape mismatch", "cannot restore the state", "cannot store 3 tokens", "got glooming websockets"):
        with pytest.raises(RuntimeError, match=words) as error, other.naming_lost_ranks():
            raise RuntimeError(words)
        assert not isinstance(error.value, RanksError)
    for typed in (torch.distributed.DistBackendError("unhandled"), RuntimeError("Timed out waiting 25000ms for recv")):
        with pytest.raises(RanksError, match="lost another one"), ThreadRanks(1, Exchange()).naming_lost_ranks():
            raise typed

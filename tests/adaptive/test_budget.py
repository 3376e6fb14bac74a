"""Budgets follow measured times and rates, stop drafting that does not pay, and use past steps only."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.noisy_oracle import NoisyChain

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.adaptive.budget import (
    BudgetPolicy,
    Entropy,
    Fixed,
    Goodput,
    MovingThreshold,
    acceptance_lower_bound,
    budget_for,
)
from specdec_fast.adaptive.cost_model import DraftOutcome, TimeTable
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Budget, Rng, Slots, StateView, TargetOutput


class Machine:
    """Steps of made-up cost and acceptance: verify(nodes of the pass), propose(largest budget), rates by row.

    answers: how often there is a draft when one is asked for.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        rates: list[float],
        verify: Callable[[int], float],
        propose: Callable[[int], float],
        most: int = 8,
        answers: float = 1.0,
    ) -> None:
        self.policy, self.rates, self.verify, self.propose, self.answers = policy, rates, verify, propose, answers
        self.most, self.random = [most] * len(rates), random.Random(4)
        self.seconds, self.tokens, self.asked = 0.0, 0, [0] * len(rates)

    def step(self) -> list[int]:
        rows = list(range(len(self.rates)))
        limits = self.policy.nodes(rows, self.most)
        assert all(0 <= limit <= most for limit, most in zip(limits, self.most, strict=True))
        outcomes = []
        for row, wanted in enumerate(limits):
            limit = wanted if self.answers == 1 or self.random.random() < self.answers else 0
            hits = itertools.takewhile(lambda _: self.random.random() < self.rates[row], range(limit))  # noqa: B023
            accepted = len(list(hits))
            outcomes.append(DraftOutcome(limit, accepted, limit))
            self.tokens += accepted + 1
            self.asked[row] += wanted
        spent = self.propose(max(limits)) if any(limits) else 0.0
        cost = self.verify(len(rows) + sum(outcome.num_drafted for outcome in outcomes))
        self.policy.observe(rows, outcomes, spent, cost)
        self.seconds += spent + cost
        return limits

    def run(self, steps: int) -> list[list[int]]:
        return [self.step() for _ in range(steps)]

    def plain(self) -> float:
        """Tokens per second without drafts."""
        return len(self.rates) / self.verify(len(self.rates))


def test_the_best_length_of_a_chain_is_found() -> None:
    """The oracle: tokens over time, with the true rates and costs, for every length."""
    for rate, slope in ((0.9, 0.02), (0.6, 0.1), (0.75, 0.05)):
        machine = Machine(Goodput(), [rate], lambda n, slope=slope: 1 + slope * n, lambda n: 0.1 * n, most=12)
        machine.run(400)

        def speed(k: int, rate: float = rate, slope: float = slope) -> float:
            return sum(rate**i for i in range(k + 1)) / (1 + slope * (k + 1) + 0.1 * k)

        best = max(range(13), key=speed)
        chosen = [limits[0] for limits in machine.run(40)]
        assert speed(sorted(chosen)[20]) > 0.97 * speed(best), (sorted(chosen)[20], best)


def test_drafting_stops_where_it_does_not_pay() -> None:
    """Nothing is accepted and a draft costs as much as a pass: below three per cent is lost over a thousand steps."""
    machine = Machine(Goodput(), [0.0], lambda n: 1.0 + 0.05 * n, lambda n: 0.5 * n, most=4)
    machine.run(1000)
    assert machine.asked[0] < 60 and machine.run(1)[0] == [0]
    assert machine.seconds * machine.plain() / machine.tokens < 1.03
    before = machine.seconds, machine.tokens
    machine.run(2000)
    assert (machine.seconds - before[0]) * machine.plain() / (machine.tokens - before[1]) < 1.03


@pytest.mark.parametrize("answers", [0.0, 0.1])
def test_a_drafter_that_rarely_has_a_draft_is_not_called_if_its_work_costs_more(answers: float) -> None:
    """Its work is paid whenever it is asked. At one draft in ten, of which four and a half tokens are accepted, it
    would bring less than half of what it takes.
    """
    machine = Machine(Goodput(), [0.85], lambda n: 1.0 + 0.05 * n, lambda n: 1.0, answers=answers)
    machine.run(1000)
    assert machine.asked[0] < 300 and machine.run(1)[0] == [0]
    before = machine.seconds, machine.tokens
    machine.run(2000)
    assert (machine.seconds - before[0]) * machine.plain() / (machine.tokens - before[1]) < 1.03


@pytest.mark.parametrize(("answers", "work"), [(0.1, 0.05), (0.0, 0.004)])
def test_a_drafter_that_rarely_has_a_draft_is_called_if_its_work_costs_little(answers: float, work: float) -> None:
    """The larger pass is paid for drafts that are there, and a look that takes next to nothing is always taken."""
    machine = Machine(Goodput(), [0.85], lambda n: 1.0 + 0.05 * n, lambda n: work, answers=answers)
    machine.run(600)
    before, machine.asked = (machine.seconds, machine.tokens), [0]
    machine.run(400)
    assert machine.asked[0] > 0.9 * 400 * 8
    assert (machine.seconds - before[0]) * machine.plain() / (machine.tokens - before[1]) < 1.005


def test_drafting_starts_again_when_it_pays_again() -> None:
    machine = Machine(Goodput(probe=8), [0.0], lambda n: 1.0 + 0.02 * n, lambda n: 0.05 * n)
    machine.run(300)
    assert machine.run(1)[0] == [0]
    machine.rates[0] = 0.95
    machine.run(1200)
    assert sum(limits[0] for limits in machine.run(20)) > 80


def test_rows_that_are_accepted_more_get_more() -> None:
    machine = Machine(Goodput(), [0.95, 0.2, 0.6], lambda n: 1 + 0.1 * n, lambda n: 0.01 * n)
    machine.run(300)
    machine.asked = [0, 0, 0]
    machine.run(60)
    assert machine.asked[0] > machine.asked[2] > machine.asked[1]


def test_a_larger_batch_gets_fewer_nodes_where_passes_are_bound_by_compute() -> None:
    per_row = []
    for rows in (1, 8):
        machine = Machine(Goodput(), [0.7] * rows, lambda n: max(1.0, n / 8), lambda n: 0.01 * n)
        machine.run(200)
        machine.asked = [0] * rows
        machine.run(50)
        per_row.append(sum(machine.asked) / rows)
    assert per_row[1] < 0.4 * per_row[0]


def test_pauses_of_the_machine_are_ignored() -> None:
    machine = Machine(Goodput(), [0.9], lambda n: 1.0 if machine.random.random() > 0.03 else 40.0, lambda n: 0.01 * n)
    machine.run(300)
    assert sum(limits[0] for limits in machine.run(50)) > 250


@pytest.mark.parametrize(
    ("rate", "most", "propose"), [(0.0, 12, 0.03), (0.03, 55, 0.08), (0.03, 64, 0.02), (0.1, 12, 0.05)]
)
def test_a_drifting_clock_does_not_start_drafting(rate: float, most: int, propose: float) -> None:
    """A machine that others use: its speed drifts, measurements scatter by a tenth, one in a hundred is a pause. Drafts
    that do not pay cost below two per cent all the same, against plain decoding on the same machine.
    """
    source, speed, passes = random.Random(2), 0.0, 0.0

    def scatter() -> float:
        nonlocal speed
        speed = 0.995 * speed + source.gauss(0, 0.015)
        return math.exp(speed + source.gauss(0, 0.1)) * (3.0 if source.random() < 0.01 else 1.0)

    def verify(nodes: int) -> float:
        nonlocal passes
        one = scatter()
        passes += one
        return one * (1 + 0.025 * (nodes - 1))

    machine = Machine(Goodput(), [rate], verify, lambda n: propose, most=most)
    for _ in range(40):
        machine.run(100)
        machine.policy.release([0])
    assert machine.seconds / machine.tokens < 1.02 * passes / 4000, "a plain step is one pass and one token"


def test_a_run_of_equal_gains_is_granted_whole_or_not_at_all() -> None:
    """Nodes 2 to 4 share the gain of node 4. Two nodes would look best, and really bring what one brings."""
    policy = Goodput(margin=0.0)
    policy._warmup_budgets = []
    policy._verify_times.prior = TimeTable(
        slowdown_rate=0.0, seconds={1: 1.0, 2: 1.05, 3: 1.1, 4: 1.6, 5: 1.65}, keys=[1, 2, 3, 4, 5]
    )
    policy._cost_model.node_gains = lambda row, most: [1.0, 1 / 3, 1 / 3, 1 / 3][:most]  # type: ignore[method-assign]
    policy._cost_model.size_probabilities = lambda row, most: [1.0] * most  # type: ignore[method-assign]
    assert policy.nodes([0], [4]) == [1]


def test_fixed_grants_each_requests_number() -> None:
    policy = budget_for("fixed")
    assert isinstance(policy, Fixed) and policy.nodes([0, 1], [3, 0]) == [3, 0]
    assert budget_for(policy) is policy and isinstance(policy, BudgetPolicy) and isinstance(Goodput(), BudgetPolicy)
    for wrong in ("most", None, []):
        with pytest.raises(ValueError, match=r"budget: got .*; expected one of entropy, fixed, goodput, or a B"):
            budget_for(wrong)
    with pytest.raises(ValueError, match="goodput first_rate: got 2"):
        Goodput(first_rate=2)
    with pytest.raises(ValueError, match="goodput probe: got 0"):
        Goodput(probe=0)
    with pytest.raises(ValueError, match="goodput margin: got -1"):
        Goodput(margin=-1)


def test_entropy_is_the_stop_of_a_draft_model() -> None:
    """The drafts equal those of the option `entropy_stop`, which takes precedence. Other drafters are refused."""

    def target() -> AutomatonTarget:
        return AutomatonTarget(random_logits(8, 256, std=1.35), max_rows=1)  # half of the states are sure of 0.05

    def drafted(budget: str, **options: float) -> list[int]:
        made = get_drafter("draft_model")(target(), num_draft_tokens=6, **options)
        engine = Engine(target(), made, budget=budget)
        (handle,) = engine.generate([[1, 2]], SamplingParams(seed=3, max_new_tokens=20))
        return [made.entropy_stop, handle.stats.num_draft_tokens, *handle.tokens]

    free, stopped = drafted("fixed"), drafted("fixed", entropy_stop=0.05)
    assert drafted("entropy") == stopped
    assert free[2:] == stopped[2:] and free[1] > stopped[1] > 0, "the same text, after more drafts"
    assert drafted("entropy", entropy_stop=0.01) == drafted("fixed", entropy_stop=0.01) != stopped
    assert Engine(target(), budget="entropy").drafter is None
    with pytest.raises(
        ValueError, match="budget entropy: got drafter ngram, which cannot stop by a distribution; expected"
    ):
        Engine(target(), get_drafter("ngram")(), budget="entropy")
    with pytest.raises(ValueError, match="entropy threshold: got 1; expected"):
        Entropy(1)


def test_an_engine_with_goodput_gives_the_same_text_and_stops_useless_drafts() -> None:
    """A slow drafter that is always wrong; the model's passes take no time beside it."""
    logits = random_logits(23, 8, seed=2)
    prompts = [[1], [2, 3], [1, 2, 3]]
    params = [SamplingParams(seed=at, max_new_tokens=90) for at in range(3)]
    want = [h.tokens for h in Engine(AutomatonTarget(logits, max_length=128)).generate(prompts, params)]

    class Slow(NoisyChain):
        def propose(self, *args: object) -> object:
            time.sleep(0.002)
            return super().propose(*args)

    drafted = {}
    for budget in ("fixed", "goodput"):
        engine = Engine(AutomatonTarget(logits, max_length=128), Slow([], 0.0, 8), budget=budget)
        handles = engine.generate(prompts, params)
        assert [handle.tokens for handle in handles] == want
        drafted[budget] = engine.stats.num_draft_tokens
    assert drafted["goodput"] < 0.4 * drafted["fixed"]


class Costly(AutomatonTarget):
    """A target whose clock advances by the number of nodes of a pass."""

    def __init__(self, *args: object, row: float = 0.1, **more: object) -> None:
        super().__init__(*args, **more)
        self.now, self.row = 0.0, row

    def score(self, draft: Draft, *rest: object) -> tuple[TargetOutput, Slots]:
        self.now += 1 + self.row * (draft.num_nodes - draft.num_rows)
        return super().score(draft, *rest)


class Paid(NoisyChain):
    """Its proposals take time on the target's clock."""

    def __init__(self, target: Costly, cost: float, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        self._target, self._cost = target, cost

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        draft = super().propose(view, rows, budget, rng)
        self._target.now += self._cost * max(draft.counts, default=1)
        return draft


def test_score_only_nodes_cost_time_and_yield_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of lookahead with their window, under goodput: what they cost is known by all the nodes that they have."""
    target, policy = Costly(random_logits(23, 8, seed=2), max_rows=1, max_length=128), Goodput()
    monkeypatch.setattr("specdec_fast.engine.stats.perf_counter", lambda: target.now)
    engine = Engine(target, get_drafter("lookahead")(window=3, ngram=3, guesses=3), budget=policy)
    engine.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=100, ignore_eos=True))
    times = policy._verify_times
    assert engine.stats.num_draft_tokens > 0 and len(times.keys) > 3
    assert [times.seconds_at(nodes) for nodes in times.keys] == pytest.approx(
        [1 + 0.1 * (nodes - 1) for nodes in times.keys]
    )


@pytest.mark.parametrize(
    ("alpha", "row", "cost", "most"),
    [(0.0, 0.1, 0.0, 12), (0.0, 0.1, 0.15, 60), (0.05, 0.08, 0.0, 55), (0.2, 0.1, 0.15, 4), (0.5, 0.1, 0.6, 4)],
)
def test_in_an_engine_goodput_is_hardly_slower_than_plain_decoding_with_any_drafter(
    alpha: float, row: float, cost: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that tells the work: drafters that do not pay, long drafts and dear ones among them. The first text
    pays for measuring, those after it for a try now and then.
    """
    logits, params = random_logits(23, 8, seed=2), SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
    texts = [[at % 8, at // 8] for at in range(8)]
    want = [handle.tokens for handle in Engine(AutomatonTarget(logits, max_length=128)).generate(texts, params)]
    target = Costly(logits, max_length=128, row=row)
    monkeypatch.setattr("specdec_fast.engine.stats.perf_counter", lambda: target.now)
    whole = [text + tokens for text, tokens in zip(texts, want, strict=True)]
    engine = Engine(target, Paid(target, cost, whole, alpha, 8, num_draft_tokens=most), budget="goodput")
    speeds = []
    for text, tokens in zip(texts, want, strict=True):
        before = target.now
        assert engine.generate([text], params)[0].tokens == tokens
        speeds.append(len(tokens) / (target.now - before))
    assert engine.stats.num_draft_tokens > 0
    assert speeds[0] > 0.9 and len(texts[1:]) / sum(1 / speed for speed in speeds[1:]) > 0.98, speeds


def test_the_entropy_bound_is_that_of_the_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [60.0, 0.0, 0.0, 0.0], [0.0, 0.0, float("-inf"), float("-inf")]])
    bound = acceptance_lower_bound(logits, torch.tensor([0.7, 2.0, 0.0]), scale=0.5)
    want = [1 - (0.5 * h) ** 0.5 for h in (math.log(4), 0.0, math.log(2))]
    assert torch.allclose(bound, torch.tensor(want), atol=1e-4)


def test_the_threshold_moves_as_published() -> None:
    """By hand: rate = rate / 2 + share / 2; threshold = 0.9 threshold + 0.1 (threshold +- 0.01, or itself)."""
    moving = MovingThreshold(0.6, 0.9)
    table = [
        # accepted, drafted, full -> rate, threshold
        (0, 4, False, 0.0, 0.601),
        (4, 4, False, 0.5, 0.602),
        (12, 12, True, 0.75, 0.603),
        (5, 5, False, 0.875, 0.604),
        (8, 8, False, 0.9375, 0.603),
        (12, 12, True, 0.96875, 0.603),
        (3, 4, False, 0.859375, 0.604),
    ]
    for accepted, drafted, full, rate, threshold in table:
        moving.update(accepted, drafted, full)
        assert (moving.rate, moving.threshold) == (pytest.approx(rate), pytest.approx(threshold))


class ByTheClock(Goodput):
    """Its times are made of what was drafted, so that a run repeats itself."""

    def observe(self, rows: Sequence[int], outcomes: Sequence[DraftOutcome], propose: float, verify: float) -> None:
        nodes = [outcome.num_scored for outcome in outcomes]
        super().observe(rows, outcomes, 1e-4 * max(nodes), 1e-3 * (1 + 0.05 * sum(nodes)))


class Peeking(Fixed):
    """Wrong on purpose: drafts where the token that the request's seed is about to draw is an even one."""

    engine: Engine

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        state, drafter = self.engine.state, self.engine.drafter
        with torch.inference_mode():
            draft = drafter.propose(state, list(rows), Budget([1] * len(rows)), state.rng(list(rows)))
        first = draft.tokens[draft.offsets[:-1].long() + 1].tolist()
        return [limit if token % 2 == 0 else 0 for limit, token in zip(most, first)]


def _first_three(policy: BudgetPolicy) -> float:
    """p-value of 4,000 texts of rule rejection under a budget, against the exact chances of their first three
    tokens.
    """
    stay, table, near = torch.zeros(1, 4, dtype=torch.long), torch.randn(1, 4), torch.randn(1, 4)
    target = AutomatonTarget(table, stay, max_rows=1000, max_length=24)
    drafter = get_drafter("draft_model")(AutomatonTarget(near, stay, max_rows=1000, max_length=24), pick="sampled")
    engine = Engine(target, drafter, rule="rejection", budget=policy)
    if isinstance(policy, Peeking):
        policy.engine = engine
    handles = [engine.submit([1], SamplingParams(seed=seed, max_new_tokens=8)) for seed in range(4000)]
    while not engine.idle:
        engine.step()
    assert engine.stats.num_draft_tokens > 0
    exact = joint(lambda text: dist(target.logits_after([1, *text]), temperature=1.0), 3, 4)
    return p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact)


def test_the_distribution_under_a_budget_that_follows_acceptance_and_one_that_peeks_is_noticed() -> None:
    torch.manual_seed(1)
    assert _first_three(ByTheClock()) > 1e-3
    torch.manual_seed(1)
    assert _first_three(Peeking()) < 1e-6

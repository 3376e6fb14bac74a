"""Selects sub-blocks to skip by Bayesian optimisation of the time per verified token.

`Bench` measures a selection on prompts, alternating with plain decoding. `search` looks for a better one with the
library optuna (extra `tune`). `judge` compares the winner's gain with the noise. None reads or writes files. Source:
Zhang et al. 2023 (Draft & Verify), section 3.2. Tests: tests/tune/test_skipped_layers_search.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

from specdec_fast.core.confidence import Interval, ratio_interval
from specdec_fast.drafters import get_drafter
from specdec_fast.engine.engine import Engine
from specdec_fast.extras import require
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.targets.skipped_layers import SkippedLayers


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured selection.

    Attributes:
        skip: The selection.
        cost: Time per verified token relative to plain decoding, the median of the repeats.
        noise: Standard deviation of the repeats, 0 for one repeat.
        ms: Milliseconds per token.
        plain_ms: Milliseconds per token of plain decoding, measured in alternation.
        tau: Tokens per target pass.
    """

    skip: SkippedLayers
    cost: float
    noise: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0
    tau: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the trial as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(entry: Any) -> Trial:
        """Parses a result of `as_json`; raises ValueError for any other value."""
        try:
            fields = {name: float(entry[name]) for name in ("cost", "noise", "ms", "plain_ms", "tau")}
            return Trial(SkippedLayers.of(entry["skip"]["attention"], entry["skip"]["mlp"]), **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"layers: got a trial {entry!r:.80} that cannot be read ({error!r})") from None


Measure = Callable[[SkippedLayers], Trial]


@dataclass(frozen=True, slots=True)
class _Round:
    """Milliseconds per token with the drafter and without it, and tokens per target pass with it."""

    ms: float
    plain_ms: float
    tau: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The winner of a search, measured anew against plain decoding.

    Attributes:
        skip: The selection.
        cost: Time per token relative to plain decoding, with its confidence interval.
        rounds: Number of measurements.
        tau: Tokens per target pass.
    """

    skip: SkippedLayers
    cost: Interval
    rounds: int
    tau: float

    @property
    def pays(self) -> bool:
        """Whether the selection skips something and is faster than plain decoding beyond the noise."""
        return len(self.skip) > 0 and self.cost.high < 1


class Bench:
    """Measures selections: decodes every prompt greedily with and without the drafter, in alternation.

    Times are per generated token, so a text that ends early is no advantage.

    Args:
        target: The target, without rows.
        prompts: Prompts as token ids.
        new_tokens: New tokens of each prompt.
        repeats: Repetitions of each measurement.
        eos_token_ids: Token ids that end a text.
        options: Further options of drafter `layer_skip`.

    Raises:
        ValueError: If there are no prompts, or if a number is below 1.
    """

    def __init__(
        self,
        target: Any,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int = 32,
        repeats: int = 2,
        eos_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        for what, size in (("prompts", len(prompts)), ("new_tokens", new_tokens), ("repeats", repeats)):
            if size < 1:
                raise ValueError(f"{what}: got {size}; expected at least 1")
        self._prompts, self._repeats = [list(prompt) for prompt in prompts], repeats
        self._params = SamplingParams(temperature=0, max_new_tokens=new_tokens)
        self._drafter = get_drafter("layer_skip")(target, skip_attention=(), **options)
        self._drafting = Engine(target, self._drafter, eos_token_ids=eos_token_ids)
        self._plain = Engine(target, eos_token_ids=eos_token_ids)
        self._warm = False

    def __call__(self, skip: SkippedLayers) -> Trial:
        """Measures one selection."""
        self._drafter.skip = skip
        if not self._warm:
            self._round(0)
            self._warm = True
        rounds = [self._round(turn) for turn in range(self._repeats)]
        ratios = [each.ms / each.plain_ms for each in rounds]
        return Trial(
            skip,
            cost=median(ratios),
            noise=stdev(ratios) if len(ratios) > 1 else 0.0,
            ms=median(each.ms for each in rounds),
            plain_ms=median(each.plain_ms for each in rounds),
            tau=rounds[-1].tau,
        )

    def _round(self, turn: int) -> _Round:
        """Decodes every prompt in both ways, one after the other, and begins with another way each time."""
        seconds, tokens, passes = [0.0, 0.0], [0, 0], [0, 0]
        for place, prompt in enumerate(self._prompts):
            for way in (0, 1) if (turn + place) % 2 == 0 else (1, 0):
                engine = (self._drafting, self._plain)[way]
                start = perf_counter()
                (handle,) = engine.generate([prompt], self._params)
                seconds[way] += perf_counter() - start
                if handle.error is not None:
                    raise ValueError(f"prompt of {len(prompt)} tokens: {handle.error}")
                tokens[way] += len(handle.tokens)
                passes[way] += handle.stats.steps
        return _Round(1e3 * seconds[0] / tokens[0], 1e3 * seconds[1] / tokens[1], tokens[0] / passes[0])


def search(
    measure: Measure,
    num_layers: int,
    trials: int,
    *,
    done: Sequence[Trial] = (),
    starts: Sequence[SkippedLayers] = (),
    seed: int = 0,
) -> Iterator[Trial]:
    """Searches for the selection with the least cost, by a Gaussian process over the 2L bits of a selection.

    Args:
        measure: Measures a selection.
        num_layers: Layers L of the target.
        trials: Number of trials, those of `done` included.
        done: Trials of earlier runs.
        starts: Selections to measure first, unless `done` has them.
        seed: Seed of the search.

    Yields:
        Every new trial.

    Raises:
        ValueError: If optuna is not installed.
    """
    require("tune", "tune", "optuna")
    import optuna
    from optuna.distributions import IntDistribution
    from optuna.samplers import GPSampler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [f"{kind}.{at}" for kind in ("attention", "mlp") for at in range(num_layers)]
    space: Any = {name: IntDistribution(0, 1) for name in names}
    study = optuna.create_study(sampler=GPSampler(seed=seed + len(done)))
    for trial in done:
        params = dict(zip(names, trial.skip.bits(num_layers)))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=trial.cost))
    known = {trial.skip for trial in done}
    for skip in dict.fromkeys(starts):
        if skip not in known:
            study.enqueue_trial(dict(zip(names, skip.bits(num_layers))))
    for _ in range(len(done), trials):
        asked = study.ask(space)
        found = measure(SkippedLayers.of_bits(asked.params[name] for name in names))
        study.tell(asked, found.cost)
        yield found


def best_of(trials: Sequence[Trial]) -> Trial:
    """Returns the selection with the least mean cost over its trials.

    A selection without skipped sub-blocks drafts with the whole target, so it is returned only if there is no other.

    Raises:
        ValueError: If there are no trials.
    """
    if not trials:
        raise ValueError("tune: got no trials")
    by_skip: dict[SkippedLayers, list[Trial]] = {}
    for trial in [trial for trial in trials if trial.skip] or trials:
        by_skip.setdefault(trial.skip, []).append(trial)
    costs = {skip: mean(trial.cost for trial in own) for skip, own in by_skip.items()}
    skip = min(costs, key=lambda each: costs[each])
    own = by_skip[skip]
    noise = stdev(trial.cost for trial in own) if len(own) > 1 else own[0].noise
    fields = {name: mean(getattr(trial, name) for trial in own) for name in ("ms", "plain_ms", "tau")}
    return Trial(skip, costs[skip], noise, **fields)


def confirm(measure: Measure, trials: Sequence[Trial], finalists: int = 3) -> list[Trial]:
    """Measures the best selections once more, since the least of many noisy costs is likely too low."""
    left, found = list(trials), []
    for _ in range(finalists):
        if left:
            skip = best_of(left).skip
            left = [trial for trial in left if trial.skip != skip]
            found.append(measure(skip))
    return found


def judge(measure: Callable[[SkippedLayers], Trial], skip: SkippedLayers, rounds: int) -> Verdict:
    """Measures a selection anew, so that the luck by which it won the search has no part in the result.

    Args:
        measure: Measures a selection once.
        skip: The selection.
        rounds: Number of measurements, at least 3. Half of them decide if the selection is slower than plain decoding.

    Returns:
        The verdict.

    Raises:
        ValueError: If `rounds` is below 3.
    """
    if rounds < 3:
        raise ValueError(f"rounds: got {rounds}; expected at least 3, for an interval")
    found: list[Trial] = []
    for at in range(rounds):
        found.append(measure(skip))
        if at + 1 >= max(rounds // 2, 3) and ratio_interval([trial.cost for trial in found]).mean >= 1:
            break
    interval = ratio_interval([trial.cost for trial in found])
    return Verdict(skip, interval, len(found), mean(trial.tau for trial in found))

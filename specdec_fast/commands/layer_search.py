"""The search of `specdec tune layers`: measures selections, keeps them in a file, and judges the best one.

Tests: tests/commands/test_tune_layers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_fast.commands.terminal_output import counted
from specdec_fast.core.confidence import CONFIDENCE
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import OWN_FIELDS, SkippedLayers, read_choice, read_layers, write_layers
from specdec_fast.tune import search_plot, skipped_layers_search
from specdec_fast.tune.skipped_layers_by_similarity import similar_choices
from specdec_fast.tune.skipped_layers_search import Bench, Trial, Verdict, best_of, confirm
from specdec_fast.tune.time_left import TrialClock

_FINALISTS = 3


class LayerSearch:
    """A search that goes on where an earlier run stopped.

    Args:
        target: The target.
        bench: Measures a selection.
        place: Result file. It is written after every trial.
        settings: What the costs depend on, for the file.
        done: Trials of earlier runs.
        rounds: Most measurements of the winner.
        as_json: Whether standard output is for JSON, so that lines about the progress go elsewhere.
    """

    def __init__(
        self,
        target: HuggingFaceTarget,
        bench: Bench,
        place: Path,
        settings: Mapping[str, Any],
        done: list[Trial],
        rounds: int,
        as_json: bool,
    ) -> None:
        self._target, self._bench, self._place, self._settings, self._done = target, bench, place, settings, done
        self._rounds, self._num_layers = rounds, target.num_layers
        self._found, self._clock = list(done), TrialClock(_FINALISTS + rounds)
        self._output = sys.stderr if as_json else sys.stdout
        if done:
            self._say(f"{place}: {counted(len(done), 'trial')} of earlier runs")

    def run(self, method: str, trials: int, seed: int, prompts: Sequence[Sequence[int]]) -> Verdict:
        """Searches, and measures the winner anew.

        Args:
            method: "bayes" or "similarity".
            trials: Most selections, including those of earlier runs.
            seed: Seed of the search.
            prompts: Prompts for the similarity of hidden states, at most as many as the target has rows.

        Returns:
            The winner, and whether it pays.
        """
        self._say(f"{counted(self._settings['prompts'], 'prompt')}: comparing hidden states of all layers")
        ranked = similar_choices(self._target, [prompt[-512:] for prompt in prompts])
        similar = [each.skip for each in ranked if each.skip]
        self._clock.start()
        if method == "bayes":
            starts = [SkippedLayers.middle(self._num_layers), *_spread(similar[:-1], max(trials // 5, 1))]
            given: Any = {"done": self._done, "starts": starts, "seed": seed}
            for trial in skipped_layers_search.search(self._bench, self._num_layers, trials, **given):
                self._keep(trial, "trial", trials)
        else:
            self._measure_spread(similar, trials)
        if len(self._found) > len(self._done):
            again = confirm(self._bench, self._found, _FINALISTS)
            last = len(self._found) + len(again)
            for trial in again:
                self._keep(trial, "again", last)
        self._say(f"measuring the best anew, at most {self._rounds} times{self._clock.of(self._rounds)}")
        return skipped_layers_search.judge(self._bench, best_of(self._found).skip, self._rounds)

    def _measure_spread(self, similar: Sequence[SkippedLayers], trials: int) -> None:
        """Measures selections by similarity that no earlier run measured, evenly from few to many sub-blocks."""
        known = {trial.skip for trial in self._done}
        selected = [skip for skip in _spread(similar, max(trials - len(self._done), 0)) if skip not in known]
        self._say(f"similarity: {counted(len(similar), 'choice')}, {len(selected)} to be timed (--trials)")
        for skip in selected:
            self._keep(self._bench(skip), "trial", len(self._done) + len(selected))

    def _keep(self, trial: Trial, what: str, last: int) -> None:
        """Writes a trial to the file, and prints it."""
        found = self._found
        found.append(trial)
        best = best_of(found)
        facts = {**self._settings, "cost": best.cost, "noise": best.noise, "tau": best.tau,
                 "trials": [each.as_json() for each in found]}  # fmt: skip
        write_layers(self._place, best.skip, self._num_layers, {**facts, "pays": None})  # not judged yet
        self._say(
            f"{what} {len(found)} of {last}: {trial.cost:.3f} of plain decoding's {trial.plain_ms:.2f} ms/token "
            f"(noise {trial.noise:.3f}), tau {trial.tau:.2f}, {len(trial.skip)} of {2 * self._num_layers} skipped; "
            f"best {best.cost:.3f}{self._clock.after_trial(last - len(found) if what == 'trial' else None)}"
        )

    def explain_interruption(self, fresh: bool) -> str:
        """Returns what was kept, and how to continue. `fresh` is whether trials of earlier runs were discarded."""
        again = f"run the same command{' without --fresh' if fresh else ''} again to continue"
        kept = f"; the best of them is in {self._place}; {again}" if self._found else ""
        return f"specdec: interrupted after {counted(len(self._found), 'trial')}{kept}"

    def finish(self, verdict: Verdict, picture: Path, title: str) -> None:
        """Writes the verdict and a plot of the search."""
        facts = {name: value for name, value in read_layers(self._place).items() if name not in OWN_FIELDS}
        facts |= {"pays": verdict.pays, "interval": [verdict.cost.low, verdict.cost.high]}
        write_layers(self._place, verdict.skip, self._num_layers, facts)
        picture.write_bytes(search_plot.search_chart(self._found, best_of(self._found), self._num_layers, title))

    def report(self, verdict: Verdict) -> dict[str, Any]:
        """Returns the result as JSON values."""
        noise = [trial.noise for trial in self._found]
        return {
            "trials": len(self._found),
            "attention": list(verdict.skip.attention),
            "mlp": list(verdict.skip.mlp),
            "cost": verdict.cost.mean,
            "interval": [verdict.cost.low, verdict.cost.high],
            "confidence": CONFIDENCE,
            "rounds": verdict.rounds,
            "noise": max(best_of(self._found).noise, sum(noise) / len(noise)),
            "tau": verdict.tau,
            "pays": verdict.pays,
        }

    def _say(self, line: str) -> None:
        print(line, file=self._output, flush=True)


def read_trials(place: Path, num_layers: int, settings: Mapping[str, Any]) -> list[Trial]:
    """Reads trials of earlier runs.

    Args:
        place: Result file, which need not exist.
        num_layers: Layers of the target.
        settings: Settings of this call.

    Returns:
        The trials.

    Raises:
        ValueError: If the file belongs to another model, or if its trials have other settings.
    """
    if not place.is_file():
        return []
    read_choice(place, num_layers)
    stored = read_layers(place)
    trials = [Trial.from_json(entry) for entry in stored.get("trials", [])]
    held = counted(len(trials), "trial")
    for name, ours in settings.items():
        if trials and stored.get(name) != ours:
            raise ValueError(
                f"{place}: holds {held} measured with {name} {stored.get(name)!r}; got {ours!r}, and their "
                "costs cannot be compared; start again with --fresh, or write elsewhere with --out"
            )
    return trials


def _spread(choices: Sequence[SkippedLayers], count: int) -> list[SkippedLayers]:
    """Selects at most that many selections, evenly from few to many skipped sub-blocks."""
    if count < 2:
        return list(choices[len(choices) // 2 :][:count])
    last, count = len(choices) - 1, min(count, len(choices))
    return [choices[round(at * last / (count - 1))] for at in range(count)] if count > 1 else list(choices)

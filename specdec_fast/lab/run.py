"""One run of the lab: its measurements, their order, and the verdict. The command and the report use its results.

Tests: tests/lab/test_run.py, tests/commands/test_lab.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.prompts import Prompt
from specdec_fast.lab import exact_distributions as exact_part
from specdec_fast.lab.backend_agreement import Agreement, run_agreement
from specdec_fast.lab.count_distances import Spread, spread
from specdec_fast.lab.draw_counts import Drawing
from specdec_fast.lab.exact_distributions import Exact, cases_for, has_a_dist, own_rules
from specdec_fast.lab.expected_acceptance import Expected, run_expected
from specdec_fast.lab.foreign_samples import Recorded, checks_of, contexts_of, summary_of
from specdec_fast.lab.greedy_texts import GreedyText, compare_greedy
from specdec_fast.lab.kill_matrix import Killed, Planted, planted_folder, run_mutants, run_planted
from specdec_fast.lab.mutant_rules import MUTANTS
from specdec_fast.lab.plots import BARS, accepted_chart, bar_scores, observed_chart, shown_bars
from specdec_fast.lab.proof_figures import proof_figures
from specdec_fast.lab.rule_acceptance import Acceptances, by_shape, compare_rules, contenders
from specdec_fast.lab.sequential_test import Ledger
from specdec_fast.lab.statistics import Z_999, Test, holm
from specdec_fast.lab.text_positions import find_places
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams

LEVEL = 1e-3
"""Probability that a run rejects any correct distribution."""

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total)."""


def _silent(what: str, done: int, total: int) -> None:
    """Shows no progress."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A test at a position, after the correction for all tests of the run.

    Attributes:
        place: Name of the position.
        test: The test.
        rejected: Whether the distribution is rejected.
    """

    place: str
    test: Test
    rejected: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return {"place": self.place, **self.test.as_dict(), "rejected": self.rejected}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: File name without extension.
        caption: Caption in one line.
        png: The PNG file.
    """

    name: str
    caption: str
    png: bytes


@dataclass(slots=True)
class Lab:
    """Results of one run. Each `run_...` method fills in its part.

    Attributes:
        out: Folder of the report.
        seed: Seed of the draws.
        progress: Called to show progress.
        header: Settings of the run.
        notes: Notes in the report.
        drawings: Draws at every position.
        spreads: Spread over the bars of every chart.
        bars: Number of bars in all charts; `bars_outside` of them are outside of their 99.9% bands.
        judged: All statistical tests.
        planted: Tests of mutants planted into the engine.
        why_no_draws: Why nothing was drawn; empty if draws were made.
        figures: Charts of the report; `proof` has the six figures of the proof.
    """

    out: Path
    seed: int = 0
    progress: Progress = _silent
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exact: list[Exact] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    agreement: list[Agreement] = field(default_factory=list)
    greedy: list[GreedyText] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    spreads: dict[str, Spread] = field(default_factory=dict)
    bars: int = 0
    bars_outside: int = 0
    judged: list[Judged] = field(default_factory=list)
    acceptances: list[Acceptances] = field(default_factory=list)
    mutants: list[Killed] = field(default_factory=list)
    planted: list[Planted] = field(default_factory=list)
    why_no_draws: str = ""
    ledger: Ledger | None = None
    figures: list[Figure] = field(default_factory=list)
    proof: list[Figure] = field(default_factory=list)

    # -- parts ------------------------------------------------------------------------------------------------------

    def run_exact(self, names: Sequence[str] | None = None) -> None:
        """Runs enumerations, closed forms and the agreement of backends for lossless rules, by default all."""
        selected = [name for name in names or own_rules() if get_rule(name).lossless]
        total = sum(len(list(cases_for(name))) for name in selected if has_a_dist(get_rule(name)))
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.progress("exact distributions", done, total)

        self.exact = exact_part.run_exact(selected, tick=tick)
        self.progress("closed forms", 0, 1)
        self.expected = run_expected(selected)
        for at, name in enumerate(selected):
            self.progress("agreement of backends", at, len(selected))
            self.agreement += run_agreement([name])

    def run_greedy(self, engine: Engine, prompts: Sequence[tuple[str, Prompt]], lengths: Sequence[int]) -> None:
        """Runs experiment A: greedy texts with and without speculation."""
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.progress("greedy texts", done, len(prompts) * len(lengths))

        self.greedy += compare_greedy(engine, prompts, lengths, tick)

    def run_draws(
        self,
        engine: Engine,
        prompts: Sequence[tuple[str, Prompt]],
        params: SamplingParams,
        draws: int,
        pick: str | None = None,
    ) -> None:
        """Runs experiments B and C: finds positions, draws there and tests the counts.

        Draws that are stored in `out` count.

        Args:
            engine: An engine with a drafter.
            prompts: Names and prompts.
            params: Sampling parameters.
            draws: Draws per position.
            pick: Proposals, as in `Drawing`.

        Raises:
            ValueError: If there is no position, or no draws are possible at any of them.
        """
        self.progress("places", 0, 1)
        found = find_places(engine, prompts, params)
        self.notes += found.missing
        if not found.places:
            raise ValueError(f"lab: no position went through verification: {'; '.join(found.missing)}")
        folder = self.out / "draws" / f"seed-{self.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        rule = engine.rule
        self.drawings = []
        for place in found.places:
            try:
                drawing = Drawing(place, rule, self.seed, device=engine.state.device, pick=pick)
            except ValueError as error:
                if "draft distribution" not in str(error):
                    raise
                self.notes.append(f"{place.name}: left out: {error}")
                continue
            # draws of other settings have other file names and are kept
            drawing.keep(folder / f"{slug(place.name)}-{drawing.fingerprint}.npz")
            self.drawings.append(drawing)
        if not self.drawings:
            raise ValueError(f"lab: nothing to draw at any place; take another --pick: {'; '.join(self.notes)}")
        total = draws * len(self.drawings)
        for drawing in self.drawings:
            before = sum(each.counts.draws for each in self.drawings)

            def tick(count: int, drawing: Drawing = drawing) -> None:
                self.progress(f"draws, {drawing.place.name}", self.draws_so_far, total)

            self.progress(f"draws, {drawing.place.name}", before, total)
            drawing.run(draws, tick)
        self._judge([(each.place.name, test) for each in self.drawings for test in each.tests()])
        self.summaries = [each.summary() for each in self.drawings]

    @property
    def draws_so_far(self) -> int:
        """Number of draws at all positions."""
        return sum(each.counts.draws for each in self.drawings)

    def run_acceptances(self, steps: int = 4000) -> None:
        """Measures mean accepted tokens of every rule at the positions."""
        names, done = own_rules(), 0
        total = len(contenders(names))

        def tick() -> None:
            nonlocal done
            done += 1
            self.progress("accepted tokens by rule", done, total)

        self.acceptances = compare_rules(names, [each.place for each in self.drawings], steps, self.seed, tick)

    def run_recorded(self, recorded: Recorded) -> None:
        """Tests recorded draws of another program."""
        self._judge([("recorded", test) for test in checks_of(recorded)])
        self.summaries = summary_of(recorded)
        for at, counts in contexts_of(recorded)[:12]:
            p, q = recorded.p[at], None if recorded.q is None else recorded.q[at]
            self._draw_observed(f"context {at}", f"{recorded.source}, context {at}", p, q, counts)

    def run_mutants(self, draws: int) -> None:
        """Computes the kill matrix, and runs the mutants planted into the engine if this is a source checkout."""
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.progress("mutants", done, len(MUTANTS))

        self.mutants = run_mutants(draws, tick)
        folder = planted_folder()
        if folder is None:
            self.notes.append("mutants of the engine: their tests are part of the source checkout, not of the package")
            return
        self.progress("mutants planted into the engine", 0, 1)
        try:
            self.planted = run_planted(folder)
        except ValueError as error:
            self.notes.append(str(error))

    def add_to_ledger(self, ledger: Ledger) -> None:
        """Adds the first tokens of this run to the ledger and saves it."""
        for drawing in self.drawings:
            rule = " ".join((drawing.rule.name, *([drawing.pick] if drawing.pick else [])))
            name = f"{self.header.get('model', '?')}/{rule}/{drawing.place.name}"
            ledger.add(name, drawing.counts.first, drawing.p)
        ledger.runs += 1
        ledger.next_seed += 1
        ledger.save()
        self.ledger = ledger

    def draw_figures(self, decode: Callable[[int], str] | None) -> None:
        """Draws the bar charts of all positions, the six figures of the proof, and the chart of rules."""
        for at, drawing in enumerate(self.drawings):
            name = drawing.place.name
            self.progress("figures", at, len(self.drawings) + 1)
            self._draw_observed(name, name, drawing.p, drawing.q, drawing.counts.first, decode)
        if self.drawings:
            # the figures of the proof use the position where p and q differ most
            shown = min(self.drawings, key=lambda each: float(np.minimum(each.p, each.q).sum()))
            for name, caption, png in proof_figures(shown.p, shown.q, decode, shown.place.name):
                self.proof.append(Figure(f"proof-{name}", caption, png))
        if self.acceptances:
            groups = [
                (title, [(f"{row.rule}: {row.proposals}", row.mean, row.half) for row in rows])
                for title, rows in by_shape(self.acceptances)
            ]
            caption = "Accepted draft tokens per step: " + "; ".join(title for title, _ in groups) + "."
            self.figures.append(Figure("accepted", caption, accepted_chart(groups)))

    def _draw_observed(
        self,
        name: str,
        title: str,
        p: np.ndarray,
        q: np.ndarray | None,
        counts: np.ndarray,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        """Draws the bar chart of one position, and records its spread and the bars outside of their bands."""
        bars, scores = shown_bars(p), bar_scores(p, counts)
        own = self.spreads[name] = spread(counts, p, bars)
        outside = int((np.abs(scores) > Z_999).sum())
        self.bars, self.bars_outside = self.bars + len(scores), self.bars_outside + outside
        caption = (
            f"{name}: the {len(bars)} likeliest tokens. Standard deviation of frequency minus probability over these: "
            f"{own.observed:.3e}; expected {own.expected:.3e}; {'inside' if own.inside else 'outside of'} the 99.9% "
            f"band {own.low:.3e} to {own.high:.3e}. {outside} of {len(scores)} bars outside of their own."
        )
        self.figures.append(Figure(slug(name), caption, observed_chart(title, p, q, counts, own, decode)))

    def _judge(self, tests: list[tuple[str, Test]]) -> None:
        """Applies Holm's correction to all tests of the run."""
        rejected = holm([test.p_value for _, test in tests], LEVEL)
        self.judged = [Judged(place, test, bad) for (place, test), bad in zip(tests, rejected)]

    # -- verdict ----------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[str]:
        """One line for each check that does not hold, with the worst bins of rejected distributions."""
        lines = [
            f"exact: {e.rule}, {e.proposal}, shape {e.shape}, {e.policy}: off by {e.error:.3g}"
            for e in self.exact
            if not e.holds
        ]
        lines += [
            f"expected: {e.rule}, {e.setting}: {e.accepted:.15g}, not {e.relation} {e.value:.15g} ({e.source})"
            for e in self.expected
            if not e.holds
        ]
        lines += [
            f"agreement: {a.rule}, {a.what}: {a.different} of {a.compared} rows differ"
            for a in self.agreement
            if not a.holds
        ]
        lines += [
            f"greedy: {g.prompt}, {g.length} tokens: first difference at token {g.difference}, gap {g.gap}"
            for g in self.greedy
            if not g.holds
        ]
        lines += [
            f"packed row: {each.place.name}: a logit {each.place.row_error:.3g} from that of a plain forward, "
            f"allowed {each.place.allowed:.3g}"
            for each in self.drawings
            if not each.place.holds
        ]
        lines += [self.why_no_draws] if self.why_no_draws else []
        for each in self.judged:
            if each.rejected:
                lines.append(f"distribution rejected: {each.place}, {each.test.name}: p = {each.test.p_value:.3g}")
                lines += [
                    f"  bin {bin_}: seen {seen}, expected {due:.1f}, z = {z:+.2f}"
                    for bin_, seen, due, z in each.test.worst
                ]
        lines += [f"mutant survived: {m.name}" for m in self.mutants if not m.killed]
        lines += [f"planted mutant survived or its check is broken: {m.name}" for m in self.planted if not m.passed]
        if self.ledger is not None and self.ledger.rejects:
            lines.append(
                f"distribution rejected over all runs ({self.ledger.runs}): ln E = {self.ledger.log_total():.2f}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Returns all results for JSON, without the figures."""
        ledger = self.ledger
        return {
            **self.header,
            "level": LEVEL,
            "holds": not self.failures,
            "failures": self.failures,
            "notes": self.notes,
            "places": [
                {
                    "name": each.place.name,
                    "kind": each.place.kind,
                    "tokens": list(each.place.tokens),
                    "row_error": each.place.row_error,
                    "row_error_allowed": each.place.allowed,
                }
                for each in self.drawings
            ],
            "summaries": self.summaries,
            "tests": [each.as_dict() for each in self.judged],
            "spreads": {name: asdict(own) | {"inside": own.inside} for name, own in self.spreads.items()},
            "greedy": [each.as_dict() for each in self.greedy],
            "exact": [each.as_dict() for each in self.exact],
            "expected": [each.as_dict() for each in self.expected],
            "agreement": [each.as_dict() for each in self.agreement],
            "acceptances": [each.as_dict() for each in self.acceptances],
            "mutants": [each.as_dict() for each in self.mutants],
            "planted": [each.as_dict() for each in self.planted],
            "ledger": None
            if ledger is None
            else {"runs": ledger.runs, "log_evidence": ledger.log_total(), "rejects": ledger.rejects},
            "figures": [f"figures/{each.name}.png" for each in (*self.figures, *self.proof)],
            "bars": BARS,
            "bars_shown": self.bars,
            "bars_outside": self.bars_outside,
        }


def slug(name: str) -> str:
    """Converts a name to a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"

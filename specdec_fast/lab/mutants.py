"""The kill matrix: for every known mistake, which check sees it and how many draws that takes.

Two kinds of mutants: the distributions of `mutant_rules`, computed here, and those planted into the engine by
tests/mutants of a source checkout, which pytest runs. Tests: tests/lab/test_mutants.py.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.lab.draw_counts import TEXT, WHOLE
from specdec_fast.lab.mutant_rules import MUTANTS, After, Mutant, Step, Text, World, world
from specdec_fast.lab.rational_oracle import text_dist
from specdec_fast.lab.statistics import draws_needed

SEEDS = tuple(range(12))
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Killed:
    """first, joint: largest total variation over small models from the target's distribution of one token and of TEXT
    tokens; draws_first, draws_joint: draws of a run of the lab with which a chi-square test sees it on the model that
    shows it best (level 0.001, power 0.99): every draw has a first token, every WHOLE-th is a text of TEXT; killers:
    the checks that see it.
    """

    name: str
    origin: str
    first: float
    joint: float
    draws_first: float
    draws_joint: float
    killers: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return bool(self.killers)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"killed": self.killed}
        return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in found.items()}


def dist_of(step: Step, place: World, length: int) -> dict[Text, float]:
    """The distribution of the first `length` tokens that a step emits when it is repeated."""
    known: dict[Text, list[tuple[float, Text]]] = {}

    def outcomes(context: Text) -> list[tuple[float, Text]]:
        if context not in known:
            known[context] = list(step(place, context))
        return known[context]

    return text_dist(outcomes, length)


def true_dist(after: After, length: int) -> dict[Text, float]:
    """The distribution of plain decoding."""
    return text_dist(lambda context: ((w, (token,)) for token, w in enumerate(after(context)) if w), length)


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Total variation of two distributions of texts."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())


def _texts(a: dict[Text, float], b: dict[Text, float]) -> float:
    """How many texts a chi-square test needs to tell distribution a from b; none are enough where they are equal."""
    texts = sorted(a.keys() | b.keys())
    wrong, right = (np.array([dist.get(text, 0.0) for text in texts]) for dist in (a, b))
    return draws_needed(wrong, right) if distance(a, b) > TOLERANCE else math.inf


def judge(mutant: Mutant, draws: int = 1_000_000, seeds: Sequence[int] = SEEDS) -> Killed:
    """Measure one mutant. draws: of a run of the lab; a statistical check kills if some model needs fewer."""
    firsts, joints, needed = [], [], []
    for seed in seeds:
        place = world(3, seed)
        pair = []
        for length, every in ((1, 1), (TEXT, WHOLE)):
            got, want = dist_of(mutant.step, place, length), true_dist(mutant.truth(place), length)
            pair.append((distance(got, want), every * _texts(got, want)))
        firsts.append(pair[0][0])
        joints.append(pair[1][0])
        needed.append((pair[0][1], pair[1][1]))
    first, joint = min(each[0] for each in needed), min(each[1] for each in needed)
    killers = [
        *(["exact, first token"] if max(firsts) > TOLERANCE else []),
        *(["exact, joint"] if max(joints) > TOLERANCE else []),
        *(["chi-square, first token"] if first <= draws else []),
        *(["chi-square, joint"] if joint <= draws else []),
    ]
    return Killed(mutant.name, mutant.origin, max(firsts), max(joints), first, joint, tuple(killers))


def run_mutants(draws: int, tick: Callable[[], None] = lambda: None) -> list[Killed]:
    """All mutants of `mutant_rules`."""
    found = []
    for mutant in MUTANTS:
        found.append(judge(mutant, draws))
        tick()
    return found


@dataclass(frozen=True, slots=True)
class Planted:
    """One test of tests/mutants: a check against one planted mistake (or against none). seconds: its duration."""

    name: str
    passed: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def planted_folder() -> Path | None:
    """tests/mutants of the source checkout this package is imported from, or None."""
    folder = Path(__file__).parents[2] / "tests" / "mutants"
    return folder if folder.is_dir() else None


def run_planted(folder: Path, *arguments: str) -> list[Planted]:
    """Run the tests of a folder in a process of their own; a passing test is a mutant that was killed.

    Raises ValueError when nothing could be run.
    """
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(
            [*command, str(folder)],
            cwd=folder.parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise ValueError(f"mutants: pytest made no report ({last}); expected the extra `test`, which has pytest")
        found = [
            Planted(
                case.get("name", "?"),
                not any(child.tag in ("failure", "error") for child in case),
                float(case.get("time", 0)),
            )
            for case in tree.parse(report).getroot().iter("testcase")
            if not any(child.tag == "skipped" for child in case)
        ]
    if not found:
        raise ValueError(f"mutants: got no tests from {folder}; expected some; is it a source checkout?")
    return found

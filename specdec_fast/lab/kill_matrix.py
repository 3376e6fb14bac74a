"""Kill matrix: which checks detect each known mistake, and with how many draws.

There are two kinds of mutants. The distributions of those in `mutant_rules` are computed here. Those of tests/mutants
are planted into the engine and run by pytest, which needs a source checkout. Tests: tests/lab/test_kill_matrix.py.
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
from specdec_fast.lab.mutant_rules import MUTANTS, Mutant
from specdec_fast.lab.mutant_steps import After, ModelPair, Step, random_models
from specdec_fast.lab.rational_oracle import Text, text_dist
from specdec_fast.lab.statistics import draws_needed

SEEDS = tuple(range(12))
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Killed:
    """How well the checks detect one mutant.

    Attributes:
        name: Name of the mutant.
        origin: Where the mistake was observed.
        first: Total variation between the emitted and the target's distribution of one token, the largest over small
            models.
        joint: The same for TEXT tokens.
        draws_first: Draws of a run that a chi-square test of first tokens needs on the most sensitive model, at level
            0.001 and power 0.99.
        draws_joint: The same for texts of TEXT tokens. Every WHOLE-th draw of a run is such a text.
        killers: Names of the checks that detect the mutant.
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
        """Whether any check detects the mutant."""
        return bool(self.killers)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON; an infinite number of draws is None."""
        found = asdict(self) | {"killed": self.killed}
        return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in found.items()}


def emitted_dist(step: Step, models: ModelPair, length: int) -> dict[Text, float]:
    """Returns the distribution of the first `length` tokens that repeated steps emit."""
    known: dict[Text, list[tuple[float, Text]]] = {}

    def outcomes(context: Text) -> list[tuple[float, Text]]:
        if context not in known:
            known[context] = list(step(models, context))
        return known[context]

    return text_dist(outcomes, length)


def true_dist(after: After, length: int) -> dict[Text, float]:
    """Returns the distribution of the first `length` tokens of plain decoding."""
    return text_dist(lambda context: ((w, (token,)) for token, w in enumerate(after(context)) if w), length)


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Returns the total variation distance between two distributions of texts."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())


def _texts_needed(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Number of texts of `a` with which a chi-square test rejects `b`; infinite if the two are equal."""
    texts = sorted(a.keys() | b.keys())
    wrong, right = (np.array([dist.get(text, 0.0) for text in texts]) for dist in (a, b))
    return draws_needed(wrong, right) if distance(a, b) > TOLERANCE else math.inf


def judge(mutant: Mutant, draws: int = 1_000_000, seeds: Sequence[int] = SEEDS) -> Killed:
    """Measures how well the checks detect one mutant.

    Args:
        mutant: The mutant.
        draws: Number of draws of a run. A statistical check kills if it needs at most this many on some model.
        seeds: Seeds of the small models.

    Returns:
        Distances, needed draws, and the checks that detect the mutant.
    """
    firsts, joints, needed = [], [], []
    for seed in seeds:
        models = random_models(3, seed)
        pair = []
        for length, every in ((1, 1), (TEXT, WHOLE)):
            got, want = emitted_dist(mutant.step, models, length), true_dist(mutant.truth(models), length)
            pair.append((distance(got, want), every * _texts_needed(got, want)))
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
    """Runs `judge` for all mutants of `mutant_rules` and calls `tick` after each."""
    found = []
    for mutant in MUTANTS:
        found.append(judge(mutant, draws))
        tick()
    return found


@dataclass(frozen=True, slots=True)
class Planted:
    """Result of one test of tests/mutants, which runs a check against one planted mistake or against none.

    Attributes:
        name: Name of the test.
        passed: Whether the test passed.
        seconds: Duration of the test.
    """

    name: str
    passed: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def planted_folder() -> Path | None:
    """Returns tests/mutants of the source checkout that this package is imported from, or None."""
    folder = Path(__file__).parents[2] / "tests" / "mutants"
    return folder if folder.is_dir() else None


def run_planted(folder: Path, *arguments: str) -> list[Planted]:
    """Runs the tests of a folder in a separate process. A passed test means that the mutant was killed.

    Args:
        folder: Folder of the tests.
        *arguments: Further arguments of pytest.

    Returns:
        Results of all tests that were not skipped.

    Raises:
        ValueError: If pytest writes no report, or the folder has no tests.
    """
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
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
            raise ValueError(
                f"mutants: got no report of pytest ({last}); expected one; install the extra `test`, which has pytest"
            )
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

"""A plugin of pytest that keeps the outcome of every test in a JSON file, whole whenever the run is ended:

OUTCOMES=tests.json python -m pytest -p benchmarks.gpu.pytest_outcomes tests/gpu
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_files import write_whole

SECONDS = 0.5
"""Least time between two writes; the last one is written at the end in any case."""


class Outcomes:
    """What is known so far. Tests that pass have no message."""

    def __init__(self, file: Path) -> None:
        self.file, self.tests, self._written = file, [], 0.0
        self.tests: list[dict[str, Any]]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """pytest's hook: a phase of a test has ended."""
        if report.when != "call" and report.passed:
            return
        words = "" if report.passed else str(report.longrepr)[-4000:]
        outcome = report.outcome if report.when == "call" or report.skipped else f"{report.outcome} in {report.when}"
        self.tests.append({"test": report.nodeid, "outcome": outcome, "seconds": report.duration, "message": words})
        if monotonic() - self._written > SECONDS:
            self.write()

    def pytest_sessionfinish(self) -> None:
        """pytest's hook."""
        self.write()

    def write(self) -> None:
        """Writes the file."""
        outcomes = [each["outcome"] for each in self.tests]
        write_whole(self.file, {"counts": {each: outcomes.count(each) for each in outcomes}, "tests": self.tests})
        self._written = monotonic()


def pytest_configure(config: Any) -> None:
    """pytest's hook: only the process that receives all outcomes writes a file."""
    if "OUTCOMES" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ["OUTCOMES"])))

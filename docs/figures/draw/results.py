"""Result files of `benchmarks/results/`, and the words that say on which machine and day they were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import Any

OWN_RUN = "measured"
"""Key of a row that was merged from a run of its own (`benchmarks/drafter_table.py`): machine and date of that run."""
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    """A result file, by its name."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def newest(name: str, **wanted: str) -> dict[str, Any]:
    """The newest of a file's machines whose environment has all `wanted` words."""
    machines = [
        each for each in read(name)["machines"]
        if all(word in str(each["environment"][key]) for key, word in wanted.items())
    ]  # fmt: skip
    found: dict[str, Any] = max(machines, key=lambda each: str(each["environment"]["date"]))
    return found


def machine(environment: dict[str, Any]) -> str:
    """Processor, vectors, cores, version of torch and date of a measurement."""
    cpu = environment["cpu"].replace("(R)", "").replace(" Processor", "")
    isa = environment["isa"].replace("AVX512", "AVX-512")
    return f"{cpu}, {isa}, {environment['cores']} cores, torch {environment['torch']}, {environment['date']}"


def source(name: str, environment: dict[str, Any], width: int = 72) -> str:
    """The lines of a caption: where the numbers come from."""
    return "\n".join(wrap(f"Measured on {machine(environment)}. benchmarks/results/{name}", width))


def marked_runs(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """A mark for every run that some rows were merged from, by the machine and date of the run."""
    runs = dict.fromkeys(machine(row[OWN_RUN]) for row in rows if OWN_RUN in row)
    if len(runs) > len(MARKS):
        raise ValueError(f"merged rows: got {len(runs)} runs; expected at most {len(MARKS)}; measure all rows in one")
    return dict(zip(runs, MARKS))


def mark(row: dict[str, Any], runs: dict[str, str]) -> str:
    """The mark of a row among `marked_runs`, with a space before it; "" for a row of the file's own run."""
    return f" {runs[machine(row[OWN_RUN])]}" if OWN_RUN in row else ""


def merged_runs(runs: dict[str, str], width: int = 72) -> str:
    """The lines of a caption that say which machine the marked rows are of; "" if no row is marked."""
    return "".join("\n" + "\n".join(wrap(f"{sign} measured on {run}", width)) for run, sign in runs.items())

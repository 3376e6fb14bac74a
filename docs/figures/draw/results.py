"""Result files of `benchmarks/results/`, and the words that say on which machine and day they were measured."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import Any

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

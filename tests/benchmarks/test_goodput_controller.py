"""The benchmark of drafters that do not pay: both sides write whole texts, a step of each in turn."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.goodput_controller import AGAIN, as_markdown, measure, methods
from benchmarks.harness.interleave import alternate
from benchmarks.harness.select_rows import RESULTS
from specdec_fast import SamplingParams


class Side:
    """Writes a text in `steps` steps and notes when."""

    def __init__(self, name: str, steps: int, log: list[str]) -> None:
        self.name, self.steps, self.log = name, steps, log

    def submit(self, text: list[int], params: SamplingParams) -> Any:
        return self

    @property
    def finished(self) -> bool:
        return self.steps == 0

    def step(self) -> None:
        self.steps -= 1
        self.log.append(self.name)


def test_sides_take_turns_and_both_write_to_the_end() -> None:
    clock = iter(range(100))
    log: list[str] = []
    sides = [Side("a", 5, log), Side("b", 2, log)]
    seconds, _ = alternate(sides, [1], SamplingParams(), lambda: float(next(clock)))
    assert "".join(log) == "abbaaaa", "who goes first alternates"
    assert seconds == [5.0, 2.0]


def test_a_row_is_measured() -> None:
    row = measure("jacobi", 1.0, rounds=1, prompts=2, new_tokens=6)
    assert row["identical"] and row["texts"] == 2 and row["tau"] >= 1
    low, high = row["speed_vs_plain_95"]
    assert low <= row["speed_vs_plain"] <= high and low > 0.1
    assert 0.5 < row["distinct_4"] <= 1
    table = as_markdown([row, {**row, "drafter": AGAIN, "distinct_4": 0.25}]).splitlines()
    assert len(table) == 4 and all(line.count("|") == 9 for line in table)
    assert table[3].split(" | ")[5] == "0.25", "how little the texts repeat themselves stands beside the ratio"


def test_every_method_was_measured_with_the_controller_on() -> None:
    found = json.loads((RESULTS / "goodput_cpu.json").read_text(encoding="utf-8"))
    rows = {(row["drafter"], row["temperature"]): row for row in found["rows"]}
    wanted = {(name, temperature) for name in (AGAIN, *methods()) for temperature in (0.0, 1.0)}
    assert wanted <= rows.keys() and len(wanted) > 50
    assert all(rows[place]["identical"] and rows[place]["speed_vs_plain"] >= 0.97 for place in wanted)

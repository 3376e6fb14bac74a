"""The README is short, and its table of methods is the recorded one."""

from __future__ import annotations

import json
import re
from pathlib import Path

RESULTS = "benchmarks/results/drafters_cpu.json"
UNMEASURED = "–"


def test_the_readme_fits_on_a_page(root: Path) -> None:
    assert len((root / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_table_of_methods_has_the_recorded_rows(root: Path) -> None:
    """Every drafter has a row. Its numbers are those of the method that the first cell names, at T = 0 and 1."""
    from specdec_fast.drafters import drafter_names

    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    below = lines[lines.index(f"<!-- results: {RESULTS} -->") + 3 :]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in below if line.startswith("| `")]
    recorded = json.loads((root / RESULTS).read_text(encoding="utf-8"))["rows"]
    rows = {(row["drafter"], row["temperature"]): row for row in recorded if row["workload"] == "mixed"}
    assert sorted(re.findall(r"`(\w+)`", cells[0])[0] for cells in table) == drafter_names()
    for cells in table:
        method = cells[0].replace("`", "")
        found = [rows[method, temperature] for temperature in (0.0, 1.0) if (method, temperature) in rows]
        expected = [f"{row[key]:.2f}" for row in found for key in ("tau", "speed_vs_plain")]
        assert cells[3:] == (expected or [UNMEASURED] * 4), method

"""The README is short, and its table of methods is the recorded one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents import listing

from docs.figures.draw.results import MARKS, OWN_RUN

RESULTS = "benchmarks/results/drafters_cpu.json"
UNMEASURED = "–"
MOST_LINES = 133
"""Lines without the table of methods, which grows with the number of drafters, and without the notes of its marks."""


def split_readme(text: str) -> tuple[list[str], list[list[str]]]:
    """Lines outside of the table of methods, and the cells of its rows."""
    lines = text.splitlines()
    start = lines.index(f"<!-- results: {RESULTS} -->") + 1
    end = next(at for at in range(start, len(lines) + 1) if at == len(lines) or not lines[at].startswith("|"))
    outside = [line for line in lines[:start] + lines[end:] if not line.startswith(tuple(MARKS))]
    return outside, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]]


def wrong_rows(text: str, recorded: list[dict[str, Any]]) -> list[str]:
    """Rows whose numbers are not the recorded ones, and rows of other runs without a mark or without its note."""
    found = []
    rows = {(row["drafter"], row["temperature"]): row for row in recorded if row["workload"] == "mixed"}
    for cells in split_readme(text)[1]:
        method = cells[0].replace("`", "").rstrip(MARKS).rstrip()
        mark = cells[0][-1] if cells[0][-1] in MARKS else ""
        measured = [rows[method, temperature] for temperature in (0.0, 1.0) if (method, temperature) in rows]
        expected = [f"{row[key]:.2f}" for row in measured for key in ("tau", "speed_vs_plain")] or [UNMEASURED] * 4
        if cells[3:] != expected:
            found.append(f"{method}: got {cells[3:]}; expected {expected}; copy tau and speed from {RESULTS}")
        if bool(mark) != any(OWN_RUN in row for row in measured):
            wanted = "no raised digit" if mark else "a raised digit, because its rows are merged from another run"
            found.append(f"{method}: got {cells[0]!r}; expected {wanted}")
        if mark and not re.search(rf"^{mark} \S", text, flags=re.MULTILINE):
            found.append(f"{method}: got no line that begins with {mark!r}; name machine and date below the table")
    return found


def test_the_readme_fits_on_a_page(root: Path) -> None:
    outside, _ = split_readme((root / "README.md").read_text(encoding="utf-8"))
    assert len(outside) <= MOST_LINES, (
        f"README.md: got {len(outside)} lines outside of the table of methods; expected at most {MOST_LINES}; move "
        "details to a page below docs/ and link to it (rows of the table are not counted)"
    )


def test_the_table_of_methods_has_the_recorded_rows(root: Path) -> None:
    """Every drafter has a row. Its numbers are those of the method that the first cell names, at T = 0 and 1."""
    from specdec_fast.drafters import drafter_names

    text = (root / "README.md").read_text(encoding="utf-8")
    _, table = split_readme(text)
    assert sorted(re.findall(r"`(\w+)`", cells[0])[0] for cells in table) == drafter_names()
    found = wrong_rows(text, json.loads((root / RESULTS).read_text(encoding="utf-8"))["rows"])
    assert not found, listing(found)


@pytest.mark.parametrize(
    ("row", "note", "reason"),
    [
        ("| `own` | m | – | 1.50 | 1.25 |", "", None),
        ("| `own` ¹ | m | – | 1.50 | 1.25 |", "¹ Measured on x.", "expected no raised digit"),
        ("| `own` | m | – | 1.50 | 1.26 |", "", "expected ['1.50', '1.25']"),
        ("| `merged`, of 8 ¹ | m | – | 2.50 | 2.25 |", "¹ Measured on x.", None),
        ("| `merged`, of 8¹ | m | – | 2.50 | 2.25 |", "¹ Measured on x.", None),
        ("| `merged`, of 8 | m | – | 2.50 | 2.25 |", "¹ Measured on x.", "expected a raised digit"),
        ("| `merged`, of 8 ¹ | m | – | 2.50 | 2.25 |", "", "begins with '¹'"),
        ("| `other` | m | – | – | – | – | – |", "", None),
    ],
)
def test_a_planted_row_is_caught(row: str, note: str, reason: str | None) -> None:
    own = {"workload": "mixed", "drafter": "own", "temperature": 0.0, "tau": 1.5, "speed_vs_plain": 1.25}
    merged = {**own, "drafter": "merged, of 8", "tau": 2.5, "speed_vs_plain": 2.25, OWN_RUN: {"date": "today"}}
    text = f"# Title\n<!-- results: {RESULTS} -->\n| drafter |\n| --- |\n{row}\n\n{note}\n"
    found = wrong_rows(text, [own, merged])
    assert len(found) == (reason is not None) and all(reason in each for each in found if reason)
    outside, table = split_readme(text)
    assert len(table) == 1 and row not in outside and (not note or note not in outside)

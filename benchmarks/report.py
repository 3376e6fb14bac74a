"""One HTML page of a GPU session, from whatever its parts left behind: python -m benchmarks.report FOLDER."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.kernels import gpu

STYLE = (
    "<!doctype html><meta charset=utf-8><title>specdec-fast on a GPU</title>"
    "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
    "tr:nth-child(even){background:#f4f4f4}</style>"
)


def _table(titles: list[str], rows: list[list[Any]]) -> str:
    lines = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in (titles, *rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def page(folder: Path) -> str:
    """Parts that were not run, or were cut short, are left out or shown as far as they came."""
    parts = [STYLE]
    if (folder / "summary.tsv").exists():
        rows = [line.split("\t") for line in (folder / "summary.tsv").read_text().splitlines()]
        parts.append("<h1>Session</h1>" + _table(["part", "result", "time"], rows))
    for file in sorted(folder.glob("step*.json")):
        try:
            found = json.loads(file.read_text())
        except json.JSONDecodeError:
            parts.append(f"<h1>Steps</h1><p>{html.escape(file.name)} was cut short.</p>")
            continue
        names = ["shape", "drafter", "rows", "drafted", "asked", "mode"]
        times = ["step_us", "target_us", "draft_us", "overhead_us"]
        rows = [[*(each[n] for n in names), *(f"{each[n]:.0f}" for n in times), f"{each['overhead_share']:.0%}",
                 each["explain"]] for each in found["steps"]]  # fmt: skip
        parts.append(f"<h1>Steps</h1><p>{html.escape(found['device'])}</p>")
        parts.append(_table([*names, *times, "overhead", "why"], rows))
    if (folder / "kernels.json").exists():
        parts.append(gpu.page(json.loads((folder / "kernels.json").read_text())))
    return "".join(parts)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "report.html").write_text(page(place))

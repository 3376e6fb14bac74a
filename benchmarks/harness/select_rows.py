"""Which rows of a benchmark are measured, and where they are written: `--only` and `--out`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def named(only: str, names: Iterable[str]) -> list[str]:
    """The names that contain one of these parts, separated by |. Raises SystemExit where none does."""
    every = list(names)
    found = [name for name in every if any(part in name for part in only.split("|"))]
    if not found:
        raise SystemExit(f"--only: got {only!r}, which is part of no name; expected part of one of {', '.join(every)}")
    return found


def where(out: Path | None, only: str, table: str) -> Path | None:
    """The file to write: `out`, or the committed one of this name, which a part of the rows does not replace."""
    found = out or (None if only else RESULTS / table)
    if found is None:
        print("--only without --out: nothing is written")
    else:
        found.parent.mkdir(parents=True, exist_ok=True)
    return found

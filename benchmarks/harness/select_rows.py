"""Which rows of a benchmark are measured, and where they are written: `--only` and `--out`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specdec_kernels.unknown_names import hint

RESULTS = Path(__file__).parents[1] / "results"


def named(only: str, names: Iterable[str]) -> list[str]:
    """Selects rows by title.

    Args:
        only: Titles, or parts of titles, separated by |. A whole title selects its row alone; a part selects every
            title that contains it. Empty selects all rows.
        names: The titles of all rows.

    Returns:
        The selected titles in the order of `names`.

    Raises:
        SystemExit: If a part occurs in no title.
    """
    every = list(names)
    found: set[str] = set()
    for part in only.split("|"):
        selected = [part] if part in every else [name for name in every if part in name]
        if not selected:
            titles = "".join(f"\n  {name}" for name in every)
            raise SystemExit(
                f"--only: got {part!r}; expected a title or part of one{hint(part, every)}\ntitles:{titles}"
            )
        found.update(selected)
    return [name for name in every if name in found]


def where(out: Path | None, only: str, table: str) -> Path | None:
    """The file to write: `out`, or the committed one of this name, which a part of the rows does not replace."""
    found = out or (None if only else RESULTS / table)
    if found is None:
        print("--only without --out: nothing is written")
    else:
        found.parent.mkdir(parents=True, exist_ok=True)
    return found

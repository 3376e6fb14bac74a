"""Result files that are whole whenever a program is ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_whole(file: Path, found: Any) -> None:
    """Writes JSON, or text as it is, so that a reader finds the file as it was before or as it is now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(found if isinstance(found, str) else json.dumps(found, indent=1, default=str))
    new.replace(file)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a result file; none if there is no file."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows

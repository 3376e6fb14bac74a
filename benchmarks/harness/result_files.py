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

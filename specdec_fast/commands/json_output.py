"""How `--json` writes. Tests: tests/commands/test_as_json.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_FLAT_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")


def print_json(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """One object, indented; a list of numbers or words takes one line, however many tokens it has. default: as
    of `json.dumps`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=default)
    print(_FLAT_LIST.sub(lambda found: f"[{' '.join(line.strip() for line in found[1].split(chr(10)))}]", text))

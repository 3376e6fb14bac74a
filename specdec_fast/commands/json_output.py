"""Output of `--json`. Tests: tests/commands/test_as_json.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_FLAT_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")


def print_json(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Prints one indented JSON object, with flat lists on one line.

    Args:
        value: The object.
        default: Converts other values, as in `json.dumps`.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, default=default)
    print(_FLAT_LIST.sub(lambda found: f"[{' '.join(line.strip() for line in found[1].split(chr(10)))}]", text))

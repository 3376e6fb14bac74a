"""Sources of grammars, checked before a library reads them. Tests: tests/integrations/test_grammars.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parse_schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON schema as a dictionary.

    Raises:
        ValueError: If it is not a JSON object.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON schema: got text that is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"JSON schema: got {type(parsed).__name__}; expected an object")
    return parsed


def check_choices(texts: Sequence[str]) -> Sequence[str]:
    """Returns texts to choose from.

    Raises:
        ValueError: If they are no list of texts that are not empty.
    """
    good = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
    if not good or not texts:
        raise ValueError(f"choice: got {texts!r:.60}; expected a list of texts that are not empty")
    return texts

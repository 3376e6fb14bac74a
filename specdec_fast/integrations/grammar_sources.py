"""Sources of grammars, checked before a library reads them. Tests: tests/integrations/test_grammars.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 128
"""Most levels of a schema. A library may overflow the stack on deeper ones, which ends the process."""

_TOO_DEEP = f"JSON schema: got more than {_MAX_DEPTH} levels; expected fewer; define inner ones under $defs with $ref"


def check_text(kind: str, source: str) -> str:
    """Returns a grammar that is a text.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(source, str):
        raise ValueError(f"{kind}: got {type(source).__name__}; expected the grammar as a string")
    return source


def parse_schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON schema as a dictionary.

    Raises:
        ValueError: If it is not a JSON object, or if it is nested too deeply.
    """
    parsed: Any = schema
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"JSON schema: got text that is not JSON: {error}") from None
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
    if not isinstance(parsed, Mapping):
        raise ValueError(f"JSON schema: got {type(parsed).__name__}; expected an object")
    level: list[Any] = [parsed]
    for _ in range(_MAX_DEPTH):
        level = [value for each in level for value in _values(each)]
    if level:
        raise ValueError(_TOO_DEEP)
    return dict(parsed)


def _values(value: Any) -> Sequence[Any]:
    """The values inside of a JSON value."""
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else ()


def check_choices(texts: Sequence[str]) -> Sequence[str]:
    """Returns texts to choose from.

    Raises:
        ValueError: If they are no list of texts that are not empty.
    """
    good = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
    if not good or not texts:
        raise ValueError(f"choice: got {texts!r:.60}; expected a list of texts that are not empty")
    return texts

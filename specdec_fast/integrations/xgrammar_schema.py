"""What xgrammar would ignore in a JSON schema, to refuse it. Tests: tests/integrations/test_grammars.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        "properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties",
        "propertyNames",
    },
    "boolean": set(),
    "null": set(),
}  # fmt: skip
"""Keywords that are enforced beside each type."""
_IGNORED = {
    "contains", "minContains", "maxContains", "uniqueItems", "not", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "$dynamicRef",
    "$recursiveRef", "oneOf",
}  # fmt: skip
_ALONE = ("$ref", "anyOf", "allOf", "const", "enum")
_FORMATS = {"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6"}
_PYTHON: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "object": Mapping,
    "array": (list, tuple),
    "null": type(None),
}
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "allOf", "enum", "required")
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_MAX_COUNT = 2**31 - 1
_MAX_ENUM = 1000  # the time of xgrammar grows with the square: 1 s for 1,000 values, 12 s for 3,000
_KNOWN = set().union(*_OF_TYPE.values(), _IGNORED, _ALONE, {"type"})


def find_ignored(schema: Any) -> str | None:
    """Returns the first thing in a schema that xgrammar would ignore, in words, or None.

    Raises:
        ValueError: If a keyword has a value of a type that it cannot have.
    """
    if not isinstance(schema, Mapping):
        return None
    _check_types(schema)
    own = {name: value for name, value in schema.items() if name in _KNOWN}
    found = _of_one(own)
    return found or next((words for inner in _inner_schemas(schema) if (words := find_ignored(inner))), None)


def patterns(schema: Any) -> Iterator[str]:
    """Yields the regular expressions of a schema that was checked by `find_ignored`."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        yield from schema.get("patternProperties", ())
        for inner in _inner_schemas(schema):
            yield from patterns(inner)


def _check_types(schema: Mapping[str, Any]) -> None:
    """Raises ValueError if a keyword of one schema has a value of a type that it cannot have."""
    for name, value in schema.items():
        expected = ""
        if name in _OBJECTS and not isinstance(value, Mapping):
            expected = "an object"
        elif name in _LISTS and not isinstance(value, (list, tuple)):
            expected = "an array"
        elif name == "anyOf" and not value:
            expected = "at least one schema"  # without one, xgrammar allows the empty text
        elif name == "required" and not all(isinstance(each, str) for each in value):
            expected = "an array of names"
        elif name == "format" and not isinstance(value, str):
            expected = "a string"
        elif name == "type" and not all(isinstance(each, str) for each in _as_list(value)):
            expected = "a string, or an array of strings"
        elif name in _COUNTS and not (isinstance(value, int) and 0 <= value <= _MAX_COUNT):
            expected = f"an integer from 0 to {_MAX_COUNT}"
        elif name == "enum" and len(value) > _MAX_ENUM:
            value, expected = f"{len(value)} values", f"at most {_MAX_ENUM} for xgrammar; use llguidance"
        if expected:
            raise ValueError(f"JSON schema: {name}: got {value!r:.60}; expected {expected}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _of_one(schema: Mapping[str, Any]) -> str | None:
    """What is ignored among the keywords of one schema."""
    for name in schema:
        if name in _IGNORED:
            return f"keyword {name!r}"
    alone = next((name for name in _ALONE if name in schema), None)
    types = _as_list(schema.get("type", ()))
    if alone == "$ref" and not str(schema["$ref"]).startswith("#"):
        return f"the reference {schema['$ref']!r:.60} to another document"
    if alone is not None:
        return _beside(alone, schema, types)
    enforced = set().union(*(_OF_TYPE.get(each, set()) for each in types), {"type"})
    for name in schema:
        if name not in enforced:
            return f"keyword {name!r} " + ("without a type" if not types else f"beside type {schema['type']!r}")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength", "format"}:
        return "a length or format beside a pattern"
    if "format" in schema and (schema["format"] not in _FORMATS or schema.keys() & {"minLength", "maxLength"}):
        return f"format {schema['format']!r}, or lengths beside it"
    properties = schema.get("properties", {})
    if properties and schema.keys() & {"patternProperties", "propertyNames", "minProperties", "maxProperties"}:
        return "patternProperties, propertyNames or a number of properties beside properties"
    missing = next((name for name in schema.get("required", ()) if name not in properties), None)
    return None if missing is None else f"required {missing!r}, which is not among the properties"


def _beside(alone: str, schema: Mapping[str, Any], types: list[str]) -> str | None:
    """What is ignored beside a keyword that stands alone."""
    others = [name for name in schema if name not in (alone, "type")]
    if others:
        return f"keyword {others[0]!r} beside {alone!r}"
    if alone == "allOf" and len(schema["allOf"]) > 1:
        return "keyword 'allOf' with several schemas"
    if not types:
        return None
    values = schema["enum"] if alone == "enum" else [schema["const"]] if alone == "const" else None
    if values is None or not all(any(_has_type(value, each) for each in types) for value in values):
        return f"keyword 'type' beside {alone!r}"
    return None


def _has_type(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON."""
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _PYTHON.get(name, ()))


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas inside of one."""
    for name in _OBJECTS:
        yield from dict(schema.get(name, {})).values()
    for name in ("items", "additionalProperties", "propertyNames"):
        yield schema.get(name)
    for name in ("prefixItems", "anyOf", "allOf"):
        yield from schema.get(name, ())

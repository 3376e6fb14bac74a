"""The page of operators: a table with shapes and backends, and the reference of each, from the registered operators.

Tests: tests/docs/test_reference.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from inspect import cleandoc
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

FAMILIES = {
    "Verification": ("*_verify", "*_verify_logits", "*_thresholds"),
    "Distributions and sampling": ("*_stats", "*_sample", "*_logits", "*_logits_overlay"),
    "Token trees": ("tree_plan", "tree_expand", "tree_grow"),
    "Attention": ("tree_attention", "attention_plan"),
    "Key/value cache": ("kv_*",),
    "Recurrent layers": ("tree_conv", "tree_delta", "tree_ssm", "state_commit", "window_commit"),
    "Drafting": ("draft_chain", "ngram_match"),
    "Model forward": ("fused_forward", "*_linear", "*_linear_int8"),
}
"""Families in the order of the page, with patterns of their operators' names; the first pattern that fits counts."""

_SHAPE = re.compile(r"\[[\w*+/(),. -]+\]")
_SENTENCE = re.compile(r"(?<=[a-z)`]{2})\.(?:\s|$)")


def family_of(operator: str) -> str:
    """The family of an operator. Raises PluginError for one that fits none."""
    for family, patterns in FAMILIES.items():
        if any(fnmatch(operator, pattern) for pattern in patterns):
            return family
    raise PluginError(
        f"operators: got {operator!r}; expected a name that docs/hooks/operator_tables.py has a family for"
    )


def families() -> dict[str, list[Any]]:
    """The registered operators by family."""
    from specdec_kernels import OPS

    found: dict[str, list[Any]] = {family: [] for family in FAMILIES}
    for name, operator in OPS.items():
        if operator.reference.__module__.startswith("specdec_kernels."):  # others may register their own
            found[family_of(name)].append(operator)
    return found


def overview() -> str:
    """A table of all operators: purpose, shapes and backends."""
    rows = ["| Operator | Purpose and shapes | Backends |", "| --- | --- | --- |"]
    for family, operators in families().items():
        if operators:
            rows.append(f"| **[{family}](#{_slug(family)})** | | |")
        for operator in operators:
            backends = ", ".join(f"`{backend.name}`" for backend in operator.backends)
            link = f"[`{operator.name}`](#{_path(operator)})"
            text = "<br>".join(part for part in (_cell(purpose(operator)), shapes(operator)) if part)
            rows.append(f"| {link} | {text} | {backends} |")
    return "\n".join(['<div class="reference-table" markdown>', "", *rows, "", "</div>"])


def reference() -> str:
    """The docstrings of all operators by family, and of the public names beside them."""
    import specdec_kernels

    parts = []
    for family, operators in families().items():
        parts += [f"## {family}", *(directive(_path(operator)) for operator in operators)]
    others = [
        name for name in specdec_kernels.__all__ if name not in specdec_kernels.OPS and name not in ("OPS", "ALWAYS")
    ]
    parts += ["## Types and dispatch", *(directive(f"specdec_kernels.{name}") for name in others)]
    return "\n\n".join(parts)


def directive(path: str, level: int = 3) -> str:
    """The line for mkdocstrings that stands for the documentation of an object."""
    return f"::: {path}\n    options:\n      heading_level: {level}"


def purpose(operator: Any) -> str:
    """The first sentence of an operator's docstring."""
    text = " ".join(cleandoc(operator.reference.__doc__ or "").split("\n\n")[0].split())
    return _SENTENCE.split(text)[0]


def shapes(operator: Any) -> str:
    """Arguments and results with their shapes, as the docstring of the reference states them."""
    described: dict[str, list[str]] = {"parameters": [], "returns": []}
    for kind, name, text in _described(operator):
        shape = _SHAPE.search(text)
        if shape:
            described[kind].append(f"`{name} {shape[0]}`".replace("` [", "[") if name else f"`{shape[0]}`")
    arguments, results = (", ".join(described[kind]) for kind in ("parameters", "returns"))
    return f"{arguments} → {results}" if results else arguments


def _described(operator: Any) -> Iterator[tuple[str, str, str]]:
    """(parameters or returns, name, description) of all that the docstring describes."""
    docstring = griffe.Docstring(cleandoc(operator.reference.__doc__ or ""))
    for section in docstring.parse("google", warnings=False):
        if section.kind.value == "parameters":
            for each in section.value:
                yield "parameters", each.name, each.description
        elif section.kind.value == "returns":
            for each in section.value:
                yield "returns", each.name or "", f"{each.annotation or ''} {each.description}"


def _path(operator: Any) -> str:
    return f"{operator.reference.__module__}.{operator.reference.__qualname__}"


def _slug(heading: str) -> str:
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

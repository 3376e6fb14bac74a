"""Grammars of text by the name of the library that makes them. Tests: tests/integrations/test_grammars.py."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

BACKENDS = {"llguidance": "grammar", "xgrammar": "xgrammar"}
"""Library -> extra that installs it."""
DEFAULT_BACKEND = "llguidance"
KINDS = ("regex", "json_schema", "choice", "lark", "ebnf")


def check_backend(grammar_backend: str) -> None:
    """Checks the name of a library.

    Raises:
        ValueError: For an unknown name.
    """
    _check_name("grammar_backend", grammar_backend, BACKENDS)


def _check_name(argument: str, name: str, known: Iterable[str]) -> None:
    from specdec_kernels.unknown_names import unknown_name  # only now: --help imports this module

    if name not in known:
        raise ValueError(unknown_name(argument, name, known))


def make_grammar(
    kind: str, source: Any, tokenizer: Any, *, grammar_backend: str = DEFAULT_BACKEND, **options: Any
) -> Any:
    """Makes a grammar for `SamplingParams(grammar=...)`.

    Args:
        kind: "regex", "json_schema", "choice" (a list of texts), "lark" (rules in Lark's syntax) or "ebnf" (rules
            `name ::= ...`, as in GBNF).
        source: The grammar in that form.
        tokenizer: A fast transformers tokenizer.
        grammar_backend: "llguidance" (extra `grammar`) or "xgrammar" (extra `xgrammar`).
        **options: Options of the kind: `whitespace` of "json_schema".

    Returns:
        A `specdec_fast.sampling.grammar.Matcher`.

    Raises:
        ValueError: For an unknown kind or library, if the library is not installed, or if it cannot read the grammar.
    """
    check_backend(grammar_backend)
    _check_name("grammar", kind, KINDS)
    module = import_module(f"specdec_fast.integrations.{grammar_backend}")
    return getattr(module, kind)(source, tokenizer, **options)

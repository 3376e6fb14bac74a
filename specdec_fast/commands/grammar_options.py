"""Options of commands that constrain texts by a grammar. Tests: tests/commands/test_generate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.commands.options import SAMPLING
from specdec_fast.extras import require
from specdec_fast.integrations.grammars import BACKENDS, check_backend, make_grammar

Regex = Annotated[
    str | None,
    typer.Option(
        "--regex", help="Regular expression that the text must match (extra: grammar).", rich_help_panel=SAMPLING
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="JSON schema that the text must follow: a file, or the schema itself (extra: grammar).",
        rich_help_panel=SAMPLING,
    ),
]
GrammarBackend = Annotated[
    str,
    typer.Option(
        "--grammar-backend",
        help="Library that reads grammars: llguidance (extra: grammar) or xgrammar (extra: xgrammar).",
        rich_help_panel=SAMPLING,
    ),
]


def refuse_grammar(regex: str | None, schema: str | None, backend: str) -> None:
    """Checks --regex, --json-schema and --grammar-backend before a model is loaded.

    Raises:
        ValueError: If they cannot be used.
    """
    check_backend(backend)
    if regex is not None and schema is not None:
        raise ValueError("--regex with --json-schema: got both; expected one of them")
    if schema is not None and not _is_inline(schema) and not Path(schema).is_file():
        raise ValueError(f"--json-schema: got {schema!r}, which is no file; expected a file, or a JSON object")
    if regex is not None or schema is not None:
        require(BACKENDS[backend], "--json-schema" if regex is None else "--regex")


def _is_inline(schema: str) -> bool:
    return schema.lstrip().startswith("{")


def read_grammar(regex: str | None, schema: str | None, tokenizer: Any, backend: str) -> Any:
    """Makes the grammar of --regex or --json-schema.

    Args:
        regex: Option `--regex`.
        schema: Option `--json-schema`: a file, or JSON text.
        tokenizer: The target's tokenizer.
        backend: Option `--grammar-backend`.

    Returns:
        The grammar, or None without either option.

    Raises:
        ValueError: If it cannot be parsed.
    """
    if regex is None and schema is None:
        return None
    if tokenizer is None:
        raise ValueError(f"--{'regex' if schema is None else 'json-schema'}: got a model without a tokenizer")
    if regex is not None:
        return make_grammar("regex", regex, tokenizer, grammar_backend=backend)
    assert schema is not None
    if _is_inline(schema):
        return make_grammar("json_schema", schema, tokenizer, grammar_backend=backend)
    try:
        text = Path(schema).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--json-schema: got {schema!r}, which is not UTF-8 text (byte {error.start})") from None
    return make_grammar("json_schema", text, tokenizer, grammar_backend=backend)

"""The page of the command line: every command with its arguments and options, from the typer application.

Tests: tests/docs/test_reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def reference() -> str:
    """Sections for the program and all its commands."""
    return "\n\n".join(_section(words, context, level) for words, context, level in commands())


def commands() -> Iterator[tuple[str, Any, int]]:
    """(words of the command, its context, depth of its heading), parents first."""
    import typer

    from specdec_fast.cli import main

    root = typer.main.get_command(main)
    yield from _walk(root, "specdec", None, 2)


def _walk(command: Any, words: str, parent: Any, level: int) -> Iterator[tuple[str, Any, int]]:
    command = _mounted(command, parent)
    context = command.context_class(command, info_name=words.rpartition(" ")[2], parent=parent)
    yield words, context, level
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        if not child.hidden:
            yield from _walk(child, f"{words} {name}", context, min(level + 1, 4))


def _mounted(command: Any, parent: Any) -> Any:
    """The application itself where the program imports it only when it runs."""
    from specdec_fast.cli import mounted

    return mounted(command.name, parent) if type(command).__name__ == "_Deferred" else command


def _section(words: str, context: Any, level: int) -> str:
    command = context.command
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} `{words}`", _text(command.help or command.short_help or ""), f"```text\n{usage}\n```"]
    for title, kind in (("Argument", "argument"), ("Option", "option")):
        rows = [_row(each, context) for each in command.get_params(context) if each.param_type_name == kind]
        rows = [row for row in rows if row is not None]
        if rows:
            table = "\n".join([f"| {title} | Description |", "| --- | --- |", *rows])
            parts.append(f'<div class="reference-table" markdown>\n\n{table}\n\n</div>')
    return "\n\n".join(part for part in parts if part)


def _row(parameter: Any, context: Any) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return None
    name, text = record
    return f"| `{name}` | {_text(text)} |".replace("\n", " ")


def _text(text: str) -> str:
    """Help as Markdown: its brackets and pipes are no markup."""
    text = text.split("\f")[0].strip()
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")

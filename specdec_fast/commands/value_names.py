"""Names of values in `--help`: TEXT, N, NUMBER or PATH, and none for flags. Tests: tests/commands/test_root.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

_NAMES = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def name_values(command: Any, context: Any) -> Any:
    """Names the values of options and arguments that have no `metavar`, of a command and of all below it.

    typer shows Python's types in their place, such as `<list[str]>`, and `<bool>` for flags, which take no value.

    Args:
        command: A command or a group of commands. It is changed.
        context: A context of it or of its parent.

    Returns:
        The same command.
    """
    for each in command.get_params(context):
        name = _NAMES.get(_type(each))
        if name is None or each.metavar is not None:
            continue
        if each.param_type_name == "option":
            each.metavar = name
        else:  # the metavar of an argument is shown in place of its own name
            each.display_type_rich = partial(_same, name)
    for child in getattr(command, "commands", {}).values():
        name_values(child, context)
    return command


def _same(name: str, ctx: Any) -> str:
    return name


def _type(option: Any) -> Any:
    """Returns the Python type of one value, or None if typer does not tell."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation

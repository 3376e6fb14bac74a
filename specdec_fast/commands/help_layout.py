"""The layout of `--help`: names of values, and plain lists in narrow terminals. Tests: tests/commands/test_root.py."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from specdec_fast.commands.word_wrap import width_of

_NARROW = 72
_NAMES = {bool: "", int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def lay_out_help(command: Any, context: Any) -> Any:
    """Names the values of options, and uses plain lists in narrow terminals, for a command and all below it.

    typer shows Python's types in place of names, such as `<list[str]>`, and `<bool>` for flags, which take no value.
    Its tables cut words in narrow terminals. It documents no way to change either, so a release that lacks an attribute
    that is used here keeps its own layout.

    Args:
        command: A command or a group of commands. It is changed.
        context: A context of it or of its parent.

    Returns:
        The same command.
    """
    for lay_out in (_name_values, _fit_width):
        with suppress(AttributeError, TypeError):
            lay_out(command, context)
    for child in getattr(command, "commands", {}).values():
        lay_out_help(child, context)
    return command


def _name_values(command: Any, context: Any) -> None:
    """Names the values of options and arguments that have no `metavar`."""
    for each in command.get_params(context):
        name = _NAMES.get(_type(each))
        if name is None or each.metavar is not None:
            continue
        if each.param_type_name == "option":
            each.metavar = name
        else:  # the metavar of an argument is shown in place of its own name
            each.display_type_rich = partial(_same, name)


def _fit_width(command: Any, context: Any) -> None:
    """Uses plain lists in narrow terminals."""
    width = width_of(sys.stdout, table=True) or _NARROW
    if width < _NARROW and not hasattr(command, "commands"):  # lists of commands fit
        narrow, settings = _narrow(command.context_class), {**command.context_settings, "terminal_width": width}
        command.context_class, command.context_settings = narrow, settings
        command.rich_markup_mode = None


def _narrow(kind: Any) -> Any:
    """Returns a kind of context whose help begins on the line below each option."""

    class Formatter(kind.formatter_class):
        def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
            super().write_dl(rows, col_max=6, col_spacing=col_spacing)

    return type(kind.__name__, (kind,), {"formatter_class": Formatter})


def _same(name: str, ctx: Any) -> str:
    return name


def _type(option: Any) -> Any:
    """Returns the Python type of one value, or None if typer does not tell."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation

"""Command-line options that concern chat templates. Tests: tests/commands/test_generate_chat.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

CHAT = "Chat"

InstructModel = Annotated[
    str,
    typer.Option(
        "--model",
        "--target",
        "-m",
        help="Instruct model: a folder, a .gguf file, a hub id, or owner/name:file.gguf. A base model needs "
        "--chat-template.",
        show_default="demo-target, a base model",
        rich_help_panel="Models",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="System message at the beginning of every conversation.", rich_help_panel=CHAT
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="File with a Jinja chat template, or the name of one of the tokenizer's (default: the model's).",
        rich_help_panel=CHAT,
    ),
]
TemplateOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option",
        metavar="NAME=VALUE",
        help="Variable of the chat template, such as enable_thinking=false; may be repeated.",
        rich_help_panel=CHAT,
    ),
]

_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_READ_BY_TOKENIZER = ("documents", "sanitize_control_tokens")


def read_template(chat_template: str | None, template_option: list[str] | None) -> dict[str, Any]:
    """Reads the options of the chat template.

    Args:
        chat_template: Option `--chat-template`.
        template_option: Options `--template-option`. A value is JSON if it parses, also with Python's spelling of
            constants; otherwise it is text.

    Returns:
        Arguments of `Engine.encode_chat`; none without these options.

    Raises:
        ValueError: If an option has no name or value or is no variable of a template, or if the file is no text.
    """
    found: dict[str, Any] = {}
    if chat_template is not None:
        path = Path(chat_template)
        try:
            found["chat_template"] = path.read_text(encoding="utf-8-sig") if path.is_file() else chat_template
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--chat-template: got {chat_template!r}, which is not UTF-8 text (byte {error.start}); convert it"
            ) from None
    options = {}
    for entry in template_option or ():
        name, equals, value = entry.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f"--template-option: got {entry!r}; expected NAME=VALUE, such as enable_thinking=false")
        try:
            options[name] = _CONSTANTS[value.lower()] if value.lower() in _CONSTANTS else json.loads(value)
        except ValueError:
            options[name] = value
    if options:
        from specdec_fast.engine.chat import TOKENIZER_ARGUMENTS  # loads torch

        found["template_options"] = options
        for name in TOKENIZER_ARGUMENTS.intersection(options):
            raise ValueError(f"--template-option: got {name!r}; expected a variable of the chat template; drop it")
    return found


def unread_options(tokenizer: Any, template: dict[str, Any]) -> list[str]:
    """Returns the template options that no chat template of the tokenizer mentions.

    Args:
        tokenizer: The tokenizer.
        template: What `read_template` returned.
    """
    from specdec_fast.engine.chat_template import template_text  # loads torch

    text = template_text(tokenizer, template.get("chat_template"))
    names = template.get("template_options", ())
    return [name for name in names if name not in _READ_BY_TOKENIZER and not re.search(rf"\b{name}\b", text)]


def note_unread_options(tokenizer: Any, template: dict[str, Any]) -> None:
    """Prints a note about template options that have no effect."""
    from specdec_fast.commands.open_engine import print_note

    for name in unread_options(tokenizer, template):
        print_note(f"--template-option {name}: the chat template does not read it")

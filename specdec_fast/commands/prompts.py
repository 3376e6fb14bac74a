"""Reads prompts: an argument, a file (text, lines, JSON, JSONL), standard input, or the bundled workload."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_fast.sampling.params import SamplingParams

Prompt = str | list[int]
_EMPTY_TEXT = "got an empty text; expected at least one character"
_NO_TOKENS = "got an empty list; expected at least one token id"
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt with its location for errors, its id, and the sampling parameters that it sets.

    Attributes:
        prompt: The prompt; of a conversation, its last message if that is text.
        where: Location in errors.
        id: Its id, or None.
        settings: Sampling parameters that it sets.
        messages: The messages of a conversation, not checked yet; None for a prompt without a chat template.
    """

    prompt: Prompt
    where: str
    id: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    messages: Any = None

    def params(self, flags: SamplingParams, at: int) -> SamplingParams:
        """Merges the prompt's own parameters with those of the flags.

        Args:
            flags: Parameters of the command line.
            at: Index of the prompt, which is added to the seed.

        Returns:
            The parameters of this prompt.

        Raises:
            ValueError: If a value is out of range; the message names the location.
        """
        seed = None if flags.seed is None else flags.seed + at
        try:
            return replace(flags, **{"seed": seed, **self.settings})
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One prompt of the bundled workload."""

    id: str
    kind: str
    prompt: str


def read_prompts(argument: str | None, file: str | None, lines: bool) -> list[Prompt]:
    """Reads prompts that may not set sampling parameters.

    Args:
        argument: A prompt on the command line.
        file: Option `--file`.
        lines: Option `--lines`.

    Returns:
        Texts, or lists of token ids.

    Raises:
        ValueError: As `read_entries`, and for a prompt that is empty or sets parameters.
    """
    entries = read_entries(argument, file, lines)
    for entry in entries:
        if entry.messages is not None:
            raise ValueError(f"{entry.where}: got messages; expected a prompt; this command applies no chat template")
        if not entry.prompt:
            raise ValueError(f"{entry.where}: {_EMPTY_TEXT if entry.prompt == '' else _NO_TOKENS}")
        for name in entry.settings:
            raise ValueError(
                f"{entry.where}: got the key {name!r}; expected a prompt without parameters: "
                "this command uses the same ones for all"
            )
    return [entry.prompt for entry in entries]


def read_entries(argument: str | None, file: str | None, lines: bool) -> list[Entry]:
    """Reads prompts from an argument, a file or standard input: text, or lists of token ids (JSON only).

    Args:
        argument: A prompt on the command line.
        file: Option `--file`; None or "-" reads standard input.
        lines: Option `--lines`.

    Returns:
        The prompts with their locations.

    Raises:
        ValueError: If there are none, they are empty, or two sources are given.
    """
    if argument is not None and file is not None:
        raise ValueError("prompt: got an argument and --file; expected one of them")
    if argument is not None:
        if lines:
            raise ValueError("--lines: got a prompt as argument; expected --file FILE or standard input")
        return [_entry(argument, "prompt", alone=True)]
    if file in (None, "-"):
        if sys.stdin is None or (file is None and sys.stdin.isatty()):  # None: standard input is closed
            raise ValueError("prompt: got none; pass it as an argument, with --file FILE, or on standard input")
        typed = _typed()
        if not typed:
            raise ValueError(
                "standard input: got nothing; expected a prompt; pass it as an argument, with --file FILE, or on "
                "standard input"
            )
        return _split(typed, "standard input", "", lines)
    assert file is not None
    path = Path(file)
    if not path.exists() or path.is_dir():
        raise ValueError(f"--file: got {file!r}, which is not a file; expected a text, .json or .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # text files of Windows may begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--file: got {file!r}, which is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    return _split(text, f"--file {file}", path.suffix, lines)


def as_conversations(entries: list[Entry], system: str | None) -> list[Entry]:
    """Makes every prompt the question of a conversation.

    Args:
        entries: Prompts and conversations.
        system: System message of all that have none, or None.

    Returns:
        Conversations.

    Raises:
        ValueError: If a prompt is a list of token ids.
    """
    return [replace(entry, messages=_messages(entry, system)) for entry in entries]


def _messages(entry: Entry, system: str | None) -> Any:
    if entry.messages is None and not isinstance(entry.prompt, str):
        raise ValueError(f"{entry.where}: got token ids with --chat; expected text; drop --chat, or pass the text")
    messages = [{"role": "user", "content": entry.prompt}] if entry.messages is None else entry.messages
    if system is None or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    has_system = isinstance(first, dict) and first.get("role") in ("system", "developer")
    return messages if has_system else [{"role": "system", "content": system}, *messages]


def _typed() -> str:
    """Reads all of standard input."""
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:
        return sys.stdin.read()
    try:  # strict decoding, which some locales do not use
        text = str(binary.read(), sys.stdin.encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input: got bytes that are not {error.encoding} text (byte {error.start}); convert it first"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, source: str, suffix: str, lines: bool) -> list[Entry]:
    """Splits a text into prompts; `source` names it in messages."""
    if lines and suffix == ".json":
        raise ValueError("--lines: got a .json file; expected a text file; JSON lists need no --lines")
    if suffix == ".jsonl" or lines:
        places = [(f"{source}, line {at}", line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [
            (where, _parse(line, where) if suffix == ".jsonl" else line.removesuffix("\r")) for where, line in places
        ]
    elif suffix == ".json":
        parsed = _parse(text, source)
        is_ids = isinstance(parsed, list) and parsed and all(isinstance(entry, int) for entry in parsed)
        found = [(source, parsed)]
        if isinstance(parsed, list) and not is_ids:
            found = [(f"{source}, prompt {at}", each) for at, each in enumerate(parsed, 1)]
    else:
        found = [(source, text.removesuffix("\n").removesuffix("\r"))]
    if not found:
        raise ValueError(f"{source}: got no prompt; expected at least one")
    return [_entry(each, where, alone=len(found) == 1) for where, each in found]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        why = f"{error.msg}, character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(
            f"{where}: got text that is not JSON ({why}); expected text in double quotes, a list of token "
            "ids, or an object with a prompt or messages; --lines takes plain text"
        ) from None


def _entry(given: Any, where: str, *, alone: bool) -> Entry:
    """Parses one prompt; an empty one is refused here only if it is `alone`."""
    if isinstance(given, dict) and "messages" in given:
        return _conversation(given, where)
    prompt: Any = given.get("prompt") if isinstance(given, dict) else given
    if alone and prompt in ("", []):
        raise ValueError(f"{where}: {_EMPTY_TEXT if prompt == '' else _NO_TOKENS}")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise ValueError(
            f"{where}: got {given!r:.80}; expected a text, a list of token ids, or an object with a prompt or messages"
        )
    if not isinstance(given, dict):
        return Entry(prompt, where)
    return Entry(prompt, where, given.get("id"), _settings(given, where))


def _conversation(given: dict[str, Any], where: str) -> Entry:
    """Parses a conversation; the engine checks its messages."""
    if "prompt" in given:
        raise ValueError(f"{where}: got a prompt and messages; expected one of them; drop the other")
    messages = given["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    prompt = text if isinstance(text, str) else ""
    return Entry(prompt, where, given.get("id"), _settings(given, where), messages)


def _settings(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the sampling parameters of an object."""
    found = {name: value for name, value in given.items() if name not in ("prompt", "messages", "id")}
    return _checked(found, where) if found else {}


def _checked(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Converts sampling parameters from JSON, whose keys are text; the values are checked later."""
    from specdec_fast.core.former_names import argument_hint
    from specdec_fast.sampling.params import SamplingParams

    known = [each.name for each in fields(SamplingParams) if each.name != "grammar"]
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None:
        words = (
            argument_hint(unknown, "SamplingParams", ["prompt", "messages", "id", *known]) or "; rename it, or drop it"
        )
        expected = f"prompt, messages, id, or a sampling parameter ({', '.join(known)})"
        raise ValueError(f"{where}: got the key {unknown!r}; expected {expected}{words}")

    def with_ids(value: Any) -> Any:
        is_map = isinstance(value, dict)
        return {int(key) if key.isdecimal() else key: each for key, each in value.items()} if is_map else value

    return {name: with_ids(value) for name, value in settings.items()}


def unescape(text: str) -> str:
    r"""Replaces \n, \t and \\ by the characters that they stand for."""
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], text)


def bundled_workload() -> list[WorkItem]:
    """Returns all bundled prompts; raises ValueError if their file is missing."""
    from specdec_fast.loading import ASSETS

    path = ASSETS / "workload.json"
    if not path.is_file():
        raise ValueError(f"workload: {path} is missing; reinstall specdec-fast")
    return [WorkItem(entry["id"], entry["kind"], entry["prompt"]) for entry in json.loads(path.read_text("utf-8"))]


def one_of_each(items: Sequence[WorkItem], count: int) -> list[WorkItem]:
    """Returns `count` items that alternate between kinds; raises ValueError if there are fewer."""
    if not 1 <= count <= len(items):
        raise ValueError(f"--prompts: got {count}; expected 1..{len(items)}, the size of the bundled workload")
    by_kind: dict[str, list[WorkItem]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    turns = [group[turn] for turn in range(len(items)) for group in by_kind.values() if turn < len(group)]
    return turns[:count]

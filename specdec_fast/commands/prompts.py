"""Where prompts come from: argument, file (text, lines, JSON, JSONL), standard input, bundled workload."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompt = str | list[int]
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One prompt of the bundled workload."""

    id: str
    kind: str
    prompt: str


def read_prompts(argument: str | None, file: str | None, lines: bool) -> list[Prompt]:
    """The prompts that the user means: text, or lists of token ids (JSON only).

    Raises ValueError when there are none, when they are empty, or when two sources are given.
    """
    if argument is not None and file is not None:
        raise ValueError("prompt: got an argument and --file; expected one of them")
    if argument is not None:
        if lines:
            raise ValueError("--lines: got a prompt as argument; expected --file FILE or standard input")
        return [_checked(argument)]
    if file in (None, "-"):
        if file is None and sys.stdin.isatty():
            raise ValueError("prompt: got none; pass it as an argument, with --file FILE, or on standard input")
        return _split(sys.stdin.read(), "", lines)
    assert file is not None
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--file: got {file!r}, which is not a file; expected a text, .json or .jsonl file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--file: got {file!r}, which is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    return _split(text, path.suffix, lines)


def _split(text: str, suffix: str, lines: bool) -> list[Prompt]:
    if lines and suffix == ".json":
        raise ValueError("--lines: got a .json file; expected a text file; JSON lists need no --lines")
    if suffix == ".jsonl":
        entries = [_parse(line, f"line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    elif suffix == ".json":
        parsed = _parse(text, "the file")
        is_ids = isinstance(parsed, list) and parsed and all(isinstance(entry, int) for entry in parsed)
        entries = parsed if isinstance(parsed, list) and not is_ids else [parsed]
    elif lines:
        entries = [line for line in text.splitlines() if line.strip()]
    else:
        entries = [text.removesuffix("\n").removesuffix("\r")]
    if not entries:
        raise ValueError("prompt: got an empty list; expected at least one prompt")
    several = len(entries) > 1
    return [_checked(entry, number if several else None) for number, entry in enumerate(entries, 1)]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--file: {where} is not JSON ({error}); expected strings or objects with a prompt") from None


def _checked(entry: Any, number: int | None = None) -> Prompt:
    """A prompt. number: its place among several; the engine refuses an empty one of these alone."""
    if isinstance(entry, dict):
        entry = entry.get("prompt")
    if number is None and entry in ("", []):
        raise ValueError("prompt: got an empty text; expected at least one character")
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in entry):
        return entry
    place = "prompt" if number is None else f"prompt {number}"
    raise ValueError(f"{place}: got {entry!r}; expected a text, a list of token ids, or an object with a prompt")


def unescape(text: str) -> str:
    r"""Turn \n, \t and \\ into what they stand for: shells pass them on as they were typed."""
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], text)


def bundled_workload() -> list[WorkItem]:
    """All prompts that come with the package. Raises ValueError when the file is missing."""
    from specdec_fast.loading import ASSETS

    path = ASSETS / "workload.json"
    if not path.is_file():
        raise ValueError(f"workload: {path} is missing; reinstall specdec-fast")
    return [WorkItem(entry["id"], entry["kind"], entry["prompt"]) for entry in json.loads(path.read_text("utf-8"))]


def one_of_each(items: Sequence[WorkItem], count: int) -> list[WorkItem]:
    """The first `count` items, kinds taking turns. Raises ValueError when there are not as many."""
    if not 1 <= count <= len(items):
        raise ValueError(f"--prompts: got {count}; expected 1..{len(items)}, the size of the bundled workload")
    by_kind: dict[str, list[WorkItem]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    turns = [group[turn] for turn in range(len(items)) for group in by_kind.values() if turn < len(group)]
    return turns[:count]

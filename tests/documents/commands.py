"""Commands of shell blocks: their syntax, their targets and their options."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from documents.blocks import SHELL, fences, without_fences


def make_targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def subcommands() -> set[str]:
    """Names that the `specdec` program answers to."""
    import typer

    from specdec_fast.cli import main

    return set(typer.main.get_command(main).list_commands(None))


def wrong_commands(root: Path, documents: Iterable[Path], verbs: set[str]) -> list[str]:
    """`make x` and `specdec x` in code that no Makefile target and no subcommand answers to."""
    targets = make_targets(root)
    found = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        code = [block.source for block in fences(text) if block.language in SHELL]
        code += re.findall(r"`([^`\n]+)`", without_fences(text))
        for name in re.findall(r"(?:^|[\n$;&] *)make ([a-z][\w-]*)", "\n".join(code)):
            if name not in targets:
                found.append(f"{document.relative_to(root)}: make {name}: no such target")
        for name in re.findall(r"(?:^|[\n$;&/] *)specdec ([a-z]+)", "\n".join(code)):
            if name not in verbs:
                known = ", ".join(sorted(verbs))
                found.append(f"{document.relative_to(root)}: specdec {name}: no such command; there are {known}")
    return found


def specdec_calls(source: str) -> Iterator[list[str]]:
    """The arguments of every call of the program in a shell block, by its name or as a module."""
    statement = ""
    for line in source.replace("\\\n", " ").splitlines():
        statement += line.strip().removeprefix("$ ")
        try:
            parts = _simple_commands(statement)
        except ValueError:  # a quoted text goes on in the next line
            statement += "\n"
            continue
        statement = ""
        for words in parts:
            if "specdec_fast.cli" in words:
                yield words[words.index("specdec_fast.cli") + 1 :]
            elif words and words[0] == "specdec":
                yield words[1:]


def _simple_commands(statement: str) -> list[list[str]]:
    """The words of the commands that operators such as `&&`, `|` and `>` separate. Raises ValueError in a quotation."""
    reader = shlex.shlex(statement, posix=True, punctuation_chars="&|;<>")
    reader.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in reader:
        if set(word) <= set("&|;<>"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def parse_error(arguments: Sequence[str]) -> str | None:
    """The program's message about a command line that it parses and does not run; None if it is valid."""
    import typer

    from specdec_fast.cli import main

    command: Any = typer.main.get_command(main)
    name, words, context = "specdec", list(arguments), None
    try:
        while True:
            context = command.make_context(name, words, parent=context)
            command = context.command  # a mounted application stands behind its name
            if not hasattr(command, "resolve_command"):
                return None
            name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except Exception as error:
        if getattr(error, "exit_code", None) == 0:  # --help
            return None
        return getattr(error, "message", None) or f"{type(error).__name__} {error}"


def misused_commands(root: Path, documents: Iterable[Path]) -> list[str]:
    """Calls of the program in shell blocks with a command, an option or a value that it does not have."""
    found = []
    for document in documents:
        blocks = [block for block in fences(document.read_text(encoding="utf-8")) if block.language in SHELL]
        for block in blocks:
            for words in specdec_calls(block.source):
                reason = parse_error(words)
                if reason is not None:
                    place = f"{document.relative_to(root)}:{block.line}"
                    found.append(f"{place}: specdec {shlex.join(words)}: {reason}")
    return found


def broken_shell(root: Path, documents: Iterable[Path]) -> list[str]:
    """Shell blocks that bash cannot parse, and modules after `python -m` that do not exist."""
    found = []
    for document in documents:
        for block in fences(document.read_text(encoding="utf-8")):
            if block.language not in SHELL:
                continue
            place = f"{document.relative_to(root)}:{block.line}"
            source = re.sub(r"^\$ ", "", block.source, flags=re.MULTILINE)
            done = subprocess.run(["bash", "-n"], input=source, capture_output=True, text=True)
            if done.returncode != 0:
                found.append(f"{place}: {done.stderr.strip()}")
            for module in re.findall(r"python[\d.]* -m ([\w.]+)", source):
                if not _module_exists(root, module):
                    found.append(f"{place}: python -m {module}: no such module")
    return found


def _module_exists(root: Path, module: str) -> bool:
    path = root / module.replace(".", "/")
    if path.with_suffix(".py").exists() or path.is_dir():
        return True
    return find_spec(module.partition(".")[0]) is not None and not module.startswith(("benchmarks.", "specdec_"))

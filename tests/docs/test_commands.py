"""Shell blocks of documents: bash parses them, and their targets, commands and options exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documents import listing
from documents.blocks import fences
from documents.commands import broken_shell, misused_commands, specdec_calls, subcommands, wrong_commands

Write = Callable[[dict[str, str]], list[Path]]


def test_named_commands_exist(root: Path, documents: list[Path]) -> None:
    found = wrong_commands(root, documents, subcommands())
    assert not found, listing(found)


def test_commands_are_understood(root: Path, documents: list[Path]) -> None:
    found = misused_commands(root, documents)
    assert not found, listing(found)
    blocks = [block for document in documents for block in fences(document.read_text(encoding="utf-8"))]
    assert len([words for block in blocks for words in specdec_calls(block.source)]) > 15, "they are not found"


def test_bash_parses_the_commands(root: Path, documents: list[Path]) -> None:
    found = broken_shell(root, documents)
    assert not found, listing(found)


def test_a_planted_command_is_caught(tmp_path: Path, write: Write) -> None:
    text = "`make test`, `make coffee`\n```bash\n$ make demo\nspecdec demo && specdec bench\nspecdec brew\n```\n"
    document, _ = write({"README.md": text, "Makefile": "demo: x\ntest:\n"})
    found = wrong_commands(tmp_path, [document], {"demo", "bench"})
    assert [line.split(":")[1].strip() for line in found] == ["make coffee", "specdec brew"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("specdec tune trees", "No such command 'trees'"),
        ("specdec train medusa a.txt --step 3  # fine otherwise", "No such option: --step"),
        ("$ specdec generate hello --temperature \\\n  warm", "valid number"),
        ("accelerate launch -m specdec_fast.cli train medusa --hedas 3", "No such option: --hedas"),
        ("specdec tune head-layers", "Missing parameter: head"),
        ("specdec kernels inspect --help >x", None),
        ("specdec generate 'two\\nlines' --nothing", "No such option: --nothing"),
        ("specdec demo && specdec tune tree --nodes 3 | head", None),
    ],
)
def test_a_planted_option_is_caught(tmp_path: Path, write: Write, line: str, reason: str | None) -> None:
    (document,) = write({"README.md": f"1. text\n   ```bash\n   {line}\n   ```\n"})
    found = misused_commands(tmp_path, [document])
    assert len(found) == (reason is not None) and all(reason in each for each in found if reason)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("for x in 1 2; do echo $x", "syntax error"),
        ("$ echo 'a", "unexpected EOF"),
        ("python -m benchmarks.nothing", "no such module"),
        ("python3 -m benchmarks.here && python -m pytest && $ python -m json.tool <x", None),
    ],
)
def test_a_planted_shell_fault_is_caught(tmp_path: Path, write: Write, source: str, reason: str | None) -> None:
    document, _ = write({"docs/a.md": f"```bash\n{source}\n```\n", "benchmarks/here.py": ""})
    found = broken_shell(tmp_path, [document])
    assert len(found) == (reason is not None) and all(reason in each for each in found if reason)

"""Python blocks of documents run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from documents import listing
from documents.blocks import NO_RUN, fences
from documents.programs import broken_programs, programs, python_blocks, run_programs

Write = Callable[[dict[str, str]], list[Path]]


def test_programs_compile(root: Path, documents: list[Path]) -> None:
    found = broken_programs(root, documents)
    assert not found, listing(found)


def test_the_programs_of_the_documents_run(root: Path, documents: list[Path], tmp_path: Path) -> None:
    """All but the blocks marked `no-run`, which need a download or a GPU, and `in-vllm`, which run in its suite."""
    runs = run_programs(root, documents, tmp_path)
    found = [f"{name}: {run.error}" for name, run in runs.items() if run.error]
    assert not found, listing(found)
    assert "tokens per target pass" in runs["README.md"].printed
    judged = [p for run in runs.values() for p in re.findall(r"^context 0, .*: p = (\d\.\d+)$", run.printed, re.M)]
    assert judged and min(map(float, judged)) > 0.001


def test_few_programs_are_not_run(documents: list[Path]) -> None:
    python = [block for document in documents for block in python_blocks(document)]
    assert len([block for block in python if NO_RUN in block.info]) <= len(python) / 10


def test_the_first_program_is_the_example(root: Path) -> None:
    blocks = fences((root / "README.md").read_text(encoding="utf-8"))
    program = next(block.source for block in blocks if block.language == "python")
    assert program.strip() in (root / "examples" / "generate.py").read_text(encoding="utf-8")


def test_a_planted_program_is_caught(tmp_path: Path, write: Write) -> None:
    (document,) = write({"README.md": "```python\nx = 1\n```\n\n```python\ndef f(:\n```\n"})
    assert len(broken_programs(tmp_path, [document])) == 1


def test_includes_are_no_programs(tmp_path: Path, write: Write) -> None:
    (document,) = write({"a.md": '```python\n--8<-- "a.py:part"\n```\n\n```python\nx = 1\n```\n'})
    assert broken_programs(tmp_path, [document]) == []
    assert [block.source for block in programs(document)] == ["x = 1\n"]


def test_planted_failures_are_caught(tmp_path: Path, write: Write) -> None:
    """Blocks share names within a document, a title makes a module, tests of a block are called."""
    module = 'x = 1\n```\n```python title="planted/part.py"\ny = 2\n```\n```python\nfrom planted.part import x, y\n'
    documents = write(
        {
            "good.md": f"```python\n{module}assert x + y == 3\n```\n```python no-run\nraise ValueError\n```\n",
            "bad.md": "```python\nx = 1\n```\ntext\n```python\nprint('seen')\nassert x == 2, 'planted'\n```\n",
            "test.md": "```python\ndef test_it() -> None:\n    assert False, 'in a test'\n```\n",
            "other.md": "```python\nprint(x)\n```\n",
        }
    )
    runs = run_programs(tmp_path, documents, tmp_path)
    errors = {name: run.error for name, run in runs.items()}
    assert errors["good.md"] is None
    assert "AssertionError: planted" in str(errors["bad.md"]) and 'bad.md", line 7' in str(errors["bad.md"])
    assert "AssertionError: in a test" in str(errors["test.md"]) and "NameError" in str(errors["other.md"])
    assert runs["bad.md"].printed == "seen\n"

"""Python blocks of documents: do they compile and run?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from documents.blocks import IN_VLLM, INCLUDE, NO_RUN, Block, fences

RUNNER = """
import contextlib, io, json, re, sys, traceback, types
results = {}
for name, blocks in json.load(sys.stdin).items():
    scope, printed, error = {"__name__": "__main__"}, io.StringIO(), None
    for line, source, title in blocks:
        try:
            with contextlib.redirect_stdout(printed):
                tests = {key for key, value in scope.items() if key.startswith("test_")}
                exec(compile("\\n" * line + source, name, "exec", dont_inherit=True), scope)
                if title.endswith(".py"):
                    sys.modules[title[:-3].replace("/", ".")] = types.SimpleNamespace(**scope)
                for test in sorted(key for key in scope.keys() - tests if key.startswith("test_")):
                    scope[test]()
        except BaseException:
            error = traceback.format_exc(limit=-3)
            break
    results[name] = [printed.getvalue(), error]
print(json.dumps(results))
"""
"""Runs the blocks of each document one after the other in one namespace, as a reader would.

A block with `title="package/module.py"` can be imported by the blocks after it; its `test_` functions are called.
"""


class Run(NamedTuple):
    """What the blocks of a document printed, and the error that stopped them, or None."""

    printed: str
    error: str | None


def programs(document: Path) -> list[Block]:
    """The Python blocks of a document that run."""
    return [block for block in python_blocks(document) if not {NO_RUN, IN_VLLM} & set(block.info.split())]


def python_blocks(document: Path) -> list[Block]:
    """The Python blocks that a document writes out, and does not include from a file."""
    blocks = fences(document.read_text(encoding="utf-8"))
    return [each for each in blocks if each.language in ("python", "py") and not each.source.startswith(INCLUDE)]


def run_programs(root: Path, documents: Iterable[Path], folder: Path) -> dict[str, Run]:
    """Runs the blocks of documents in one process, in an empty folder that sees the examples.

    Returns:
        A `Run` for every document with blocks, by its path from the root.
    """
    sources = {
        str(each.relative_to(root)): [(block.line, block.source, _title(block)) for block in programs(each)]
        for each in documents
    }
    sources = {name: blocks for name, blocks in sources.items() if blocks}
    if (root / "examples").is_dir():
        (folder / "examples").symlink_to(root / "examples")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root / "tests")}
    command: Sequence[str] = [sys.executable, "-W", "error::UserWarning:specdec_kernels", "-c", RUNNER]
    done = subprocess.run(
        command, input=json.dumps(sources), capture_output=True, text=True, cwd=folder, env=environment
    )
    if done.returncode != 0:
        return {name: Run("", done.stderr) for name in sources}
    return {name: Run(*found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


def _title(block: Block) -> str:
    found = re.search(r'title="([^"]*)"', block.info)
    return found[1] if found else ""


def broken_programs(root: Path, documents: Iterable[Path]) -> list[str]:
    """Python blocks that do not compile."""
    found = []
    for document in documents:
        for block in python_blocks(document):
            try:
                compile(block.source, f"{document.name}:{block.line}", "exec")
            except SyntaxError as error:
                found.append(f"{document.relative_to(root)}:{block.line}: {error}")
    return found

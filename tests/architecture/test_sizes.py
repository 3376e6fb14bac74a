"""No source file is too long to read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

LIMIT = 400
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")


def too_long(root: Path, files: Iterable[Path]) -> list[str]:
    """One line per source file that is longer than LIMIT lines."""
    found = []
    for path in files:
        if path.suffix in SUFFIXES:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LIMIT:
                found.append(f"{path.relative_to(root)}: {lines} lines; at most {LIMIT}; split it by responsibility")
    return found


def test_no_source_file_is_longer_than_400_lines(root: Path, listed: Callable[[Path], list[Path]]) -> None:
    assert too_long(root, listed(root)) == []


def test_a_file_of_401_lines_is_caught(tmp_path: Path, listed: Callable[[Path], list[Path]]) -> None:
    (tmp_path / "fits.py").write_text("x = 1\n" * LIMIT)
    (tmp_path / "long.cpp").write_text("int x;\n" * (LIMIT + 1))
    (tmp_path / "long.md").write_text("text\n" * (LIMIT + 1))
    assert [line.split(":")[0] for line in too_long(tmp_path, listed(tmp_path))] == ["long.cpp"]

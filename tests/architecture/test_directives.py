"""Preprocessor lines of C++ sources that only another compiler reads."""

from __future__ import annotations

import re
from pathlib import Path

DIRECTIVES = {"define", "elif", "else", "endif", "error", "if", "ifdef", "ifndef", "include", "pragma", "undef"}


def broken(text: str) -> list[str]:
    """Returns lines that begin with an unknown directive, and pragmas that end before their last argument."""
    lines = re.findall(r"^[ \t]*#.*$", text, flags=re.MULTILINE)
    known = [re.match(r"[ \t]*#[ \t]*(\w+)", line) for line in lines]
    unknown = [line for line, name in zip(lines, known) if name is None or name[1] not in DIRECTIVES]
    return unknown + [line for line in lines if "#pragma clang attribute push" in line and not line.endswith(")")]


def test_directives_stand_on_one_line(root: Path) -> None:
    """GCC skips the branches of other compilers, so a directive that is broken in two passes its build."""
    sources = [path for suffix in ("*.h", "*.cpp", "*.cu") for path in (root / "csrc").rglob(suffix)]
    assert len(sources) > 50
    assert {str(path): found for path in sources if (found := broken(path.read_text(encoding="utf-8")))} == {}


def test_a_directive_in_two_lines_is_found() -> None:
    pragma = '#pragma clang attribute push(__attribute__((target("avx2"))), apply_to ='
    assert broken(f"{pragma} function)\n#endif\n") == []
    assert broken(f"{pragma}\n#function)\n#endif\n") == ["#function)", pragma]

"""A checkout whose environment has programs that build and run nothing, for tests of the Makefile."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fake_checkout(place: Path, **programs: str) -> None:
    """Copies what make reads, and writes programs into env/bin.

    Args:
        place: The folder of the checkout.
        **programs: Text of each program, such as `python` and `specdec`.
    """
    for name in ("Makefile", "setup.py", "pyproject.toml", "requirements/demo.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    for name, text in programs.items():
        program = place / "env" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

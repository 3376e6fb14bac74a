"""The build reports its progress, through pip and make too."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
from oracles.fake_checkout import fake_checkout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the class of setup.py; here it reports every twentieth of a second."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    monkeypatch.chdir(ROOT)
    found = runpy.run_path(str(ROOT / "setup.py"))["Progress"]
    monkeypatch.setattr(found, "EVERY", 0.05)
    return found


def wait_for(said: list[str], words: str) -> None:
    end = time.monotonic() + 20
    while not any(line.startswith(words) for line in said):
        assert time.monotonic() < end, said
        time.sleep(0.01)


def test_files_are_counted_while_they_are_compiled(progress: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with progress(str(tmp_path), 3, said.append):
        assert said == ["compiling 3 files, which takes a few minutes"]
        for number, name in enumerate(("a.o", "verify/b.o", "verify/c.o"), 1):
            wait_for(said, f"compiled {number - 1} of 3 files in 0 s")
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    assert re.fullmatch(r"compiled 3 of 3 files in \d+ s", said[-1])


def test_files_of_an_earlier_build_are_not_counted(progress: Any, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "old.o").touch()
    os.utime(tmp_path / "old.o", (1e9, 1e9))
    with progress(str(tmp_path), 2, said.append):
        (tmp_path / "new.o").touch()
    assert said[0] == "compiling 2 files, which takes a few minutes; those that did not change are kept"
    assert re.fullmatch(r"compiled 1 files in \d+ s", said[-1])


def test_a_build_that_fails_ends_the_reports(progress: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(SystemExit), progress(str(tmp_path), 2, said.append):
        raise SystemExit(1)
    assert said[-1].startswith("compiled 0 of 2 files")
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count


PYTHON = """#!/bin/sh
case "$*" in *"-e ."*)
    echo "  Running command Building editable"
    echo "  specdec-fast: compiled 12 of 61 files in 30 s"
    while [ -e waiting ]; do sleep 0.1; done
    echo "  Created wheel for specdec-fast: filename=specdec_fast.whl"
    echo "  [13/61] c++ -c csrc/verify/a.cpp"
    exit $(cat status);;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """Makes a checkout with a Python that builds nothing."""
    fake_checkout(tmp_path, python=PYTHON, specdec="#!/bin/sh\n")
    (tmp_path / "status").write_text("0")
    yield tmp_path
    (tmp_path / "waiting").unlink(missing_ok=True)


def started(checkout: Path) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("SPECDEC_BUILD", "MAKEFLAGS", "VENV")}
    command = ["make", "demo", "VENV=env", "PYTHON=env/bin/python"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=checkout, env=env, text=True, **streams)


NEEDS_MAKE = pytest.mark.skipif(
    shutil.which("make") is None or not Path("/bin/bash").exists(), reason="no make or no bash"
)


@NEEDS_MAKE
def test_make_shows_the_lines_while_pip_runs_and_nothing_else_of_it(checkout: Path) -> None:
    (checkout / "waiting").touch()
    process = started(checkout)
    assert process.stdout is not None
    lines = iter(process.stdout)
    assert any(line == "  compiled 12 of 61 files in 30 s\n" for line in lines), "before pip has ended"
    (checkout / "waiting").unlink()
    rest = "".join(lines)
    assert process.wait() == 0 and "c++ -c" not in rest and "whl" not in rest
    assert "c++ -c" in (checkout / "build" / "pip.log").read_text()


@NEEDS_MAKE
def test_make_shows_all_output_of_pip_if_it_fails(checkout: Path) -> None:
    (checkout / "status").write_text("1")
    process = started(checkout)
    said, _ = process.communicate()
    assert process.returncode != 0 and "[13/61] c++ -c csrc/verify/a.cpp" in said

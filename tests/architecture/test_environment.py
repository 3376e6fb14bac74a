"""The environment of contributors: targets install the packages that `make demo` leaves out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def test_tests_that_lack_a_package_say_how_to_get_it(tmp_path: Path, root: Path) -> None:
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text("import a_missing_package.part\n")
    (tmp_path / "test_two.py").write_text("def test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_one.py", "test_two.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    words = "a_missing_package: not installed; `make environment` installs all packages of the tests into .venv"
    assert done.returncode != 0 and words in done.stdout.splitlines()
    done = subprocess.run([*command[:-2], "test_two.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "make environment" not in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["environment", "lane-unit", "lane-architecture", "lint", "bench"])
def test_targets_install_the_packages_of_tests_after_the_demo(root: Path, tmp_path: Path, target: str) -> None:
    """After the demo, targets install the packages of the tests."""
    stamps = tmp_path / "env" / "stamps"
    stamps.mkdir(parents=True)
    command = ["make", "-n", "-C", str(root), f"VENV={tmp_path / 'env'}", target]
    # a make that runs this test passes its own variables in MAKEFLAGS
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert "-r requirements/test.txt" in shown and "-r requirements/demo.txt" in shown
    demo = subprocess.run([*command[:-1], "demo"], capture_output=True, text=True, check=True, env=env).stdout
    assert "-r requirements/test.txt" not in demo and "-r requirements/demo.txt" in demo

"""Outcomes of tests on a GPU are kept as they come, and a test that leaves the device unusable fails alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import torch

broken = []

def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize

def test_first(): pass
def test_that_breaks_the_device(): broken.append(1)
def test_that_fails(): assert 1 == 2
def test_last(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tests beside the conftest of tests/gpu."""
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_device.py").write_text(TESTS)
    return tmp_path


def outcomes(folder: Path, *words: str) -> tuple[dict[str, str], str]:
    """The outcome of each test, and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.pytest_outcomes", *words, "test_device.py"]
    own = {"OUTCOMES": str(folder / "tests.json"), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=120)
    found = json.loads((folder / "tests.json").read_text())
    assert sum(found["counts"].values()) == len(found["tests"])
    return {each["test"].rpartition("::")[2]: each["outcome"] for each in found["tests"]}, done.stdout + done.stderr


def test_a_test_that_breaks_the_device_fails_alone(folder: Path) -> None:
    found, printed = outcomes(folder, "-n", "1")
    assert found["test_first"] == found["test_last"] == "passed" and found["test_that_fails"] == "failed"
    assert found["test_that_breaks_the_device"] != "passed" or "crashed" in printed
    assert "test_that_breaks_the_device: the device no longer works: CUDA error: an illegal memory access" in printed


def test_without_other_processes_the_run_ends_there(folder: Path) -> None:
    found, printed = outcomes(folder)
    assert "test_last" not in found and "the device no longer works" in printed

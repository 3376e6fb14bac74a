"""Triton's own driver and launcher without a GPU: each launch reaches cuLaunchKernelEx as the Python call asks for it.

`cuda_driver.c` becomes a libcuda.so.1, and Triton compiles its driver.c and links it with that. Triton's code then
loads cubins and annotates, packs and launches arguments. The library reads from each cubin what a driver reads:
architecture, registers, required block, number and sizes of parameters. Shown for every launch: kernel, device, stream,
grid, block, shared memory and the bytes of each parameter. Not shown are the machine code, the checks of a real driver
beyond these, and whether an address lies in memory of the device: the simulated GPU checks that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels import simulated_gpu
from specdec_kernels.inspection import machine_code

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("cuda_driver.c")
CALLS = Path(__file__).with_name("triton_driver_calls.py")
FULL = os.environ.get("SPECDEC_KERNELS_FULL") == "1"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100") if FULL else ("sm_90",)


def compiler() -> str | None:
    """Returns the C compiler that Triton takes, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def missing() -> str | None:
    """Returns why Triton's driver cannot be built here, or None."""
    if compiler() is None:
        return "neither gcc nor clang is on PATH"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h is not installed"
    return simulated_gpu.unavailable_reason()


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def library() -> Path:
    """Returns the folder of a libcuda.so.1 that is compiled with the cuda.h of the installed Triton."""
    import triton

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    text = hashlib.sha256(f"{triton.__version__} {compiler()} {DRIVER.read_text()}".encode()).hexdigest()
    made = ROOT / "build" / "triton-simulated" / text[:16] / "libcuda.so.1"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_name(f"{os.getpid()}.so")
        command = [str(compiler()), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{made.name}"]
        done = subprocess.run(
            [*command, f"-I{headers}", str(DRIVER), "-o", str(unfinished)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        unfinished.rename(made)
    return made.parent


def called(architecture: str, part: str) -> dict[str, Any]:
    """Runs `triton_driver_calls.py` and returns what it found."""
    folder = str(library())
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "TRITON_LIBCUDA_PATH": folder}
    command = [sys.executable, str(CALLS), folder, architecture, part]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_reaches_the_driver_with_the_parameters_of_the_call(architecture: str) -> None:
    found = called(architecture, "operators")
    assert set(found["kernels"]) >= {variant.kernel for variant in machine_code.variants()}
    assert found["launches"] > 500
    assert found["refused"] == (["tree_attention/float8 cache"] if architecture == "sm_80" else [])
    assert found["most_shared"] > 49_152, "one kernel at least needs shared memory that has to be asked for"


FAULTS = {
    "none": "nothing",
    "a float for an int": "TypeError: .*float",
    "arguments in another order": "AssertionError: planted: parameter first is 03000000, expected 05000000; "
    "parameter second is 05000000, expected 03000000",
    "more warps than compiled for": "RuntimeError: Triton Error .CUDA.: invalid argument",
    "more shared memory than asked for": "RuntimeError: Triton Error .CUDA.: invalid argument",
    "the stream of another device": "RuntimeError: Triton Error .CUDA.: invalid resource handle",
    "a kernel of another device": "RuntimeError: Triton Error .CUDA.: invalid resource handle",
    "less shared memory than the kernel takes": "OutOfResources: .*shared memory, Required: .*, Hardware limit: 100",
}
"""What is planted between a call and the driver, and the error."""


def test_faults_between_a_call_and_the_driver_are_seen() -> None:
    found = called("sm_90", "faults")
    assert list(found) == list(FAULTS)
    for name, error in FAULTS.items():
        assert re.match(error, found[name]), f"{name}: {found[name]}"

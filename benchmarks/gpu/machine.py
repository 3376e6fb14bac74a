"""The machine of a GPU session, as JSON, and what about it needs a word: python -m benchmarks.gpu.machine FOLDER.

Exit status 1 if there is no CUDA device, since nothing can be measured then.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernel_cache import untested
from benchmarks.harness.result_files import write_whole

WANTED_SHARED = 160 << 10
"""Bytes of shared memory of a program that tree attention's tiles are chosen for."""


def printed(*command: str) -> str | None:
    """The last line that a program prints, or None where there is no such program."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return next(iter(done.stdout.strip().splitlines()[-1:]), "")


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """Versions and, where there is one, the device."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "commit": printed("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{
            package: installed(package) for package in ("triton", "transformers", "flashinfer-python", "vllm", "sglang")
        },
        "driver": printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": printed("nvcc", "--version"),
        "device": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": torch.cuda.get_device_name(0),
            "capability": list(torch.cuda.get_device_capability(0)),
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "l2_cache": properties.L2_cache_size,
            "shared_memory_per_block": properties.shared_memory_per_block_optin,
        }
    return found


def remarks(found: dict[str, Any]) -> list[str]:
    """One line for each thing that is not as a session expects, with what happens instead."""
    lines = []
    if found["device"] is None:
        driver = "nvidia-smi says " + repr(found["driver"]) if found["driver"] is not None else "there is no nvidia-smi"
        lines.append(f"no CUDA device ({driver}, torch is {found['torch']}): nothing is run; --rehearse needs none")
    if found["triton"] is None:
        lines.append("triton is not installed: its kernels cannot run; the references serve tensors on the GPU")
    elif words := untested(found["triton"]):
        lines.append(words)
    shared = found.get("shared_memory_per_block", WANTED_SHARED)
    if shared < WANTED_SHARED:
        lines.append(
            f"{found['device']} has {shared:,} bytes of shared memory per block, tree attention's tiles want "
            f"{WANTED_SHARED:,}: it runs with one pipeline stage fewer where that fits, and else is refused"
        )
    return lines


def main(folder: Path) -> int:
    """Writes machine.json and prints the remarks. Returns the exit status."""
    found = facts()
    said = remarks(found)
    write_whole(folder / "machine.json", found | {"remarks": said})
    for name, value in found.items():
        print(f"{name}: {value}")
    for line in said:
        print(f"gpu_session: {line}")
    return found["device"] is None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

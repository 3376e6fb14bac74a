"""The verification kernel itself beside one read of the logits, C++ beside C++ (verify_beside_read.cpp).

What test_verify_ops.py measures through Python has a call with 16 tensors and 8 results in it. Here both sides are
functions of one program, which takes turns between them.

    python -m pytest benchmarks/kernels/test_verify_beside_read.py -s
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import pytest

HERE, VOCAB, NODES, ROUNDS = Path(__file__).parent, 151_936, 8, 1000
MEMORY = 192 << 20
"""Bytes of target logits that the sides go round through: each sees a half of them, three times 32 MiB of cache."""
FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fopenmp"]
"""As setup.py has them, and OpenMP, as torch's pool."""


@pytest.fixture(scope="session")
def program(tmp_path_factory: Any) -> Path:
    """Built from the sources of the extension, without torch: half a minute."""
    cc, cxx = shutil.which("cc"), shutil.which("c++")
    if cc is None or cxx is None:
        pytest.skip("no C and C++ compiler for the program")
    folder, csrc = tmp_path_factory.mktemp("beside_read"), HERE.parents[1] / "csrc"
    read = [cc, "-O3", "-march=native", "-fopenmp", "-Wno-psabi", "-c", HERE / "read_once.c", "-o", folder / "read.o"]
    subprocess.run(read, check=True)
    sources = [HERE / "verify_beside_read.cpp", csrc / "isa.cpp", *sorted((csrc / "verify").glob("*.cpp"))]
    subprocess.run([cxx, *FLAGS, f"-I{csrc}", *sources, folder / "read.o", "-o", folder / "beside_read"], check=True)
    return folder / "beside_read"


@pytest.mark.parametrize("where", ["cached", "memory"])
@pytest.mark.parametrize("draft", ["near", "same"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_beside_reading_the_logits(
    benchmark: Any, program: Path, threads: int, dtype: str, rule: str, draft: str, where: str
) -> None:
    """A chain of seven draft tokens, drafts and places as in test_verify_ops.py."""
    apart, step = {"near": "0.5", "same": "0"}[draft], NODES * VOCAB * (4 if dtype == "float32" else 2)
    sets = 1 if where == "cached" else MEMORY // step // 2 * 2  # even: a set is always the same side's
    command = [program, str(VOCAB), str(NODES), str(threads), apart, str(sets), str(ROUNDS), rule, dtype]
    *lines, last = benchmark.pedantic(lambda: subprocess.check_output(command, text=True), rounds=1).splitlines()
    found = [tuple(map(float, line.split())) for line in lines]
    ratio, kept = median(verify / read for read, verify in found), float(last.split()[0])
    assert len(found) == ROUNDS and (kept == NODES - 1 if draft == "same" else 1 < kept < NODES - 1)
    benchmark.extra_info |= {
        "median_ratio": round(ratio, 2),
        "read_us": round(median(read for read, _ in found), 1),
        "verify_us": round(median(verify for _, verify in found), 1),
        "mean_accepted": round(kept, 2),
    }
    print(f"\n{threads} threads, {dtype}, {rule}, {draft}, {where}: rejection_verify / read: median {ratio:.2f}")

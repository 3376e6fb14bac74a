"""No verification operator allocates a buffer of the size of the logits, temporary or kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specdec_kernels import OPS
from specdec_kernels.dispatch import extension
from specdec_kernels.testing.samples_verify import VERIFY_SAMPLES

ROWS, VOCAB = 16, 151_936
ROW = 4 * VOCAB
FEW = 4 * ROW  # a copy of bfloat16 logits takes twice as much
NAMES = sorted(
    name
    for name, sample in VERIFY_SAMPLES.items()
    if "vocab" in sample.names
    and not name.endswith("_thresholds")  # these return the residual weights
    and any(backend.name == "cpu" for backend in OPS[name].backends)
)
PROBE = f"""
import json, os, pathlib, torch
from specdec_kernels import OPS, use_backend
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.testing.samples_verify import VERIFY_SAMPLES

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

def growth(run):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    run()
    return peak() - before

def in_a_process(run, small):
    # of its own, where no large call was made before: what a first one keeps shows as well
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        small()  # code and shared pages come in
        os.write(start, str(growth(run)).encode())
        os._exit(0)
    os.close(start)
    with open(end) as answer:
        found = int(answer.read())
    os.waitpid(child, 0)
    return found

def caller(name, rows, nodes, vocab):
    call = VERIFY_SAMPLES[name].make(Sizes(rows=rows, nodes=nodes, vocab=vocab, dtype=dtype))
    return lambda: OPS[name](*call.arguments, **call.options)

torch.set_num_threads(1)
found, kept = {{}}, []
with use_backend("cpu"):
    for dtype in (torch.float32, torch.bfloat16):
        for name in {NAMES!r}:
            found[f"{{name}} {{dtype}}"] = in_a_process(caller(name, {ROWS // 4}, 4, {VOCAB}), caller(name, 1, 2, 100))
matrix = torch.zeros({ROWS}, {VOCAB}, dtype=torch.bfloat16)
found["a copy"] = in_a_process(lambda: matrix.clone(), lambda: matrix[:1, :100].clone())
found["a lasting copy"] = in_a_process(lambda: kept.append(matrix.clone()), lambda: kept.append(0))
print(json.dumps(found))
"""


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a resettable peak of memory")
def test_nothing_of_the_size_of_the_logits_is_allocated() -> None:
    """The first call with many rows allocates at most a few rows of float32."""
    # freed memory returns to the system at once, so every large allocation is counted
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for copy in ("a copy", "a lasting copy"):
        assert found.pop(copy) > 0.9 * 2 * ROWS * VOCAB > FEW, "the measurement sees nothing"
    assert len(found) == 2 * len(NAMES) >= 20
    assert {name: size / ROW for name, size in found.items() if size > FEW} == {}

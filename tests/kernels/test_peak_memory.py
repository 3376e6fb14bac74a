"""No verification operator makes a buffer of the size of the logits, float32 copies of half-precision ones included."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specdec_kernels import extension
from specdec_kernels.samples_verify import VERIFY_SAMPLES

ROWS, VOCAB = 16, 151_936
BUFFER = 4 * ROWS * VOCAB
OPS = sorted(
    name
    for name, sample in VERIFY_SAMPLES.items()
    if "vocab" in sample.names and not name.endswith("_thresholds")  # these return the residual weights
)
PROBE = f"""
import json, pathlib, torch
from specdec_kernels import OPS, use_backend
from specdec_kernels.samples import Sizes
from specdec_kernels.samples_verify import VERIFY_SAMPLES

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

def growth(run):
    run()  # threads start, their scratch is made
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    run()
    return peak() - before

found = {{}}
with use_backend("cpu"):
    for dtype in (torch.float32, torch.bfloat16):
        for name in {OPS!r}:
            call = VERIFY_SAMPLES[name].make(Sizes(rows={ROWS // 4}, nodes=4, vocab={VOCAB}, dtype=dtype))
            found[f"{{name}} {{dtype}}"] = growth(lambda: OPS[name](*call.arguments, **call.options))
matrix = torch.zeros({ROWS}, {VOCAB}, dtype=torch.bfloat16)
found["a copy"] = growth(lambda: matrix.float())
print(json.dumps(found))
"""


@pytest.mark.skipif(extension.missing() is not None, reason=str(extension.missing()))
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of memory to be read here")
def test_nothing_of_the_size_of_the_logits_is_allocated() -> None:
    # what is freed goes back to the system at once, so that every large allocation shows
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("a copy") > 0.9 * BUFFER, "the measurement sees nothing"
    assert len(found) == 2 * len(OPS) >= 20
    assert {name: size for name, size in found.items() if size > BUFFER // 2} == {}

"""The test bed: bfloat16 equals torch's, overflows raise, and reads out of bounds end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.interpreter import guarded

from specdec_kernels import OPS, use_backend

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def arithmetic(x, y, out, matrix, count: tl.constexpr):
    ids = tl.arange(0, count)
    a, b = tl.load(x + ids), tl.load(y + ids)
    tl.store(out + ids, a + b)
    tl.store(out + count + ids, a * b)
    tl.store(out + 2 * count + ids, tl.where(a > b, a, b))
    tl.store(out + 3 * count + ids, (a.to(tl.float32) * 1.001).to(tl.bfloat16))
    tl.store(out + 4 * count, tl.max(a, 0))
    tl.store(out + 4 * count + 1, tl.sum(tl.where(ids < 2, a, 0.0), 0))
    square = tl.reshape(a, (count // 16, 16))
    tl.store(matrix + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], tl.dot(tl.trans(square), square))


def test_bfloat16_equals_torch(generator: torch.Generator) -> None:
    x, y = (torch.randn(256, generator=generator).bfloat16() * 3 for _ in range(2))
    out, matrix = torch.zeros(4 * 256 + 2, dtype=torch.bfloat16), torch.zeros(16, 16)
    arithmetic[(1,)](x, y, out, matrix, 256)
    want = torch.cat(
        [x + y, x * y, torch.maximum(x, y), (x.float() * 1.001).bfloat16(), x.max()[None], x[:2].sum()[None]]
    )
    assert torch.equal(out, want)
    square = x.view(16, 16).float()
    torch.testing.assert_close(matrix, square.T @ square, rtol=1e-5, atol=1e-5)


@triton.jit
def product(x, out):
    tl.store(out, tl.load(x) * tl.load(x))


def test_an_overflow_raises() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    product[(1,)](torch.tensor([46340], dtype=torch.int32), out)
    assert out.item() == 46340**2
    with pytest.raises(Exception, match="overflow"):
        product[(1,)](torch.tensor([46341], dtype=torch.int32), out)


@triton.jit
def sums(x, y, out):
    """Sums of blocks, and of unsigned numbers."""
    ids = tl.arange(0, 4)
    a, b = tl.load(x + ids), tl.load(y + ids)
    tl.store(out + ids, a + b)
    tl.store(out + ids, a - b)
    tl.store(out, (tl.load(x).to(tl.uint32) - tl.load(y).to(tl.uint32)).to(tl.int32))


@pytest.mark.parametrize("backwards", [False, True])
def test_an_overflow_in_a_block_raises_and_its_absence_does_not(backwards: bool) -> None:
    most, out = 2**31 - 1, torch.zeros(4, dtype=torch.int32)

    def block(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers[::-1] if backwards else numbers, dtype=torch.int32)

    sums[(1,)](block(7, most, 0, 7), block(7, 0, -most, 7), out)
    assert out.tolist() == [0, *block(0, most, most, 0)[1:].tolist()]
    for x, y in ((block(7, most, 0, 7), block(7, 1, 0, 7)), (block(7, -most, 0, 7), block(7, 2, 0, 7))):
        with pytest.raises(Exception, match=r"int32 overflow detected for operation (add|sub)"):
            sums[(1,)](x, y, out)
    with pytest.raises(Exception, match="int32 overflow detected for operation sub"):
        sums[(1,)](block(3, 3, 3, 3), block(4, 4, 4, 4), out)


READ = """
import sys
sys.path[:0] = {path!r}
import torch, triton, triton.language as tl
from oracles.interpreter import guarded, install
install()
from test_interpreter_kernel import copy
x = guarded(torch.arange(40.0).view(5, 8), row_stride={stride})
out = torch.zeros(5, 8)
for row in range(5):
    copy[(1,)](x[row], out[row], {limit}, 16)
print("survived", bool((out == torch.arange(40.0).view(5, 8)).all()))
"""
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def copy(x, out, limit, size: tl.constexpr):
    ids = tl.arange(0, size)
    tl.store(out + ids, tl.load(x + ids, mask=ids < limit), mask=ids < 8)
"""


@pytest.mark.parametrize("stride", [None, 11])
def test_a_read_beyond_the_end_ends_the_process(tmp_path: Path, stride: int | None) -> None:
    (tmp_path / "test_interpreter_kernel.py").write_text(KERNEL)
    path = [str(Path(__file__).parents[1]), str(tmp_path)]
    for limit, survives in ((8, True), (9, False)):
        code = READ.format(path=path, stride=stride, limit=limit)
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        if survives:
            assert done.stdout.strip() == "survived True", done.stderr
        else:
            assert done.returncode == -signal.SIGSEGV and not done.stdout


def test_guarded_tensors_are_copies() -> None:
    for values in (torch.randn(3, 5).bfloat16(), torch.tensor([True, False]), torch.arange(7), torch.zeros(0, 4)):
        assert torch.equal(guarded(values), values)
    padded = guarded(torch.ones(3, 5), row_stride=9)
    assert padded.stride() == (9, 1) and torch.equal(padded, torch.ones(3, 5))
    assert torch.as_strided(padded, (4,), (1,), padded.storage_offset() + 5).isnan().all()


def test_the_interpreter_serves_explicit_requests_only() -> None:
    for name, op in OPS.items():
        if any(backend.name == "triton" for backend in op.backends):
            with use_backend():
                assert not any(row.backend == "triton" and row.chosen for row in op.explain()), name

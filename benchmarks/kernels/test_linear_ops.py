"""Cost of batch_invariant_linear beside torch's own linear layer, for the rows of a step and the shapes of the
bundled target.
"""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import batch_invariant_linear, batch_invariant_linear_int8, quantize_int8

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("shape", [(256, 256), (448, 256), (1024, 1024), (65536, 640)], ids=str)
@pytest.mark.parametrize("side", ["own", "torch", "torch, stored by output"])
def test_batch_invariant_linear(benchmark, side: str, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    outputs, inputs = shape
    count = max(1, 2**23 // (outputs * inputs))  # beyond the caches
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    if side != "torch, stored by output":
        weights = [weight.t().contiguous().t() for weight in weights]
    x, run = (
        torch.randn(rows, inputs).to(dtype),
        batch_invariant_linear if side == "own" else torch.nn.functional.linear,
    )
    benchmark.extra_info["calls"] = len(weights)
    with torch.inference_mode():
        benchmark(lambda: [run(x, weight) for weight in weights])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("shape", [(1024, 1024), (65536, 640)], ids=str)
def test_batch_invariant_linear_int8(benchmark, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """int8 weights; `dtype` is that of the activations."""
    outputs, inputs = shape
    weights = [quantize_int8(torch.randn(outputs, inputs)) for _ in range(max(1, 2**23 // (outputs * inputs)))]
    x = torch.randn(rows, inputs).to(dtype)
    benchmark.extra_info["calls"] = len(weights)
    with torch.inference_mode():
        benchmark(lambda: [batch_invariant_linear_int8(x, values, scale) for values, scale in weights])

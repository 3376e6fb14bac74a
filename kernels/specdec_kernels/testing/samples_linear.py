"""Sample calls of linear layers. Tests: tests/kernels/test_torch_ops.py, tests/commands/test_kernels.py."""

from __future__ import annotations

from ..ops.batch_invariant_linear_int8 import quantize_int8
from ..ops.batch_invariant_linear_int8.reference import DTYPES
from .samples_attention import Call, Sample, Sizes, random, size_of


def linear(sizes: Sizes) -> Call:
    """A square linear layer over the nodes of all rows, with a transposed weight in memory."""
    inputs = sizes.heads * sizes.width
    x, weight = random(sizes, sizes.rows * sizes.nodes, inputs), random(sizes, inputs, inputs, scale=inputs**-0.5)
    return Call((x, weight.t(), random(sizes, inputs)), bytes=size_of(x, x, weight), products=x.numel() * inputs)


def linear_int8(sizes: Sizes) -> Call:
    """A square linear layer with int8 weights over the nodes of all rows."""
    inputs = sizes.heads * sizes.width
    x, bias = random(sizes, sizes.rows * sizes.nodes, inputs), random(sizes, inputs)
    weight, scale = quantize_int8(random(sizes, inputs, inputs, scale=inputs**-0.5))
    return Call((x, weight, scale, bias), bytes=size_of(x, x, weight), products=x.numel() * inputs)


_NAMES = ("rows", "nodes", "heads", "width", "dtype")
LINEAR_SAMPLES = {
    "batch_invariant_linear": Sample(linear, _NAMES),
    "batch_invariant_linear_int8": Sample(linear_int8, _NAMES, dtypes=DTYPES),
}

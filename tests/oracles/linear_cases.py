"""Products of rows with a weight for `batch_invariant_linear`: any number of rows, every kind of leftover outputs,
both layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

# Tiles of up to six rows, whose prefetch depends on their number.
BANDS = {"one row": (1, 1), "one tile": (2, 6), "two": (7, 12), "three": (13, 18), "more": (19, 40)}


@dataclass(frozen=True)
class Product:
    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def errors(self, out: Tensor) -> tuple[float, float]:
        """Returns (root mean square, largest) of the errors of `out` against float64."""
        bias = None if self.bias is None else self.bias.double()
        error = out.double() - torch.nn.functional.linear(self.x.double(), self.weight.double(), bias)
        return float(error.square().mean().sqrt()), float(error.abs().max())

    def plain(self) -> Tensor:
        """Returns torch's result in the same dtype."""
        return torch.nn.functional.linear(self.x, self.weight, self.bias)


@st.composite
def products(draw: st.DrawFn, band: tuple[int, int]) -> Product:
    """Draws outputs of wide tiles (256), tiles (64), vectors (16) and parts of a vector, each of them or not.

    The weight is surrounded by NaN, so that a read beside it that enters a sum is detected.
    """
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows, inputs = draw(st.integers(*band)), draw(st.sampled_from([1, 2, 15, 16, 31, 64, 127, 128, 129, 300, 513]))
    outputs = sum(draw(st.sampled_from([0, part])) for part in (256, 64, 32, 16, 8, 4)) + draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x, weight = (torch.randn(n, inputs, generator=g).to(dtype) for n in (rows, max(outputs, 1)))
    before, behind = draw(st.sampled_from([(0, 0), (0, 5), (3, 0), (16, 64)]))
    by_input = draw(st.booleans())
    kept = weight.t() if by_input else weight
    table = torch.full((kept.shape[0], before + kept.shape[1] + behind), torch.nan, dtype=dtype)
    place = table[:, before : before + kept.shape[1]]
    place.copy_(kept)
    bias = torch.randn(max(outputs, 1), generator=g).to(dtype) if draw(st.booleans()) else None
    return Product(x, place.t() if by_input else place, bias)

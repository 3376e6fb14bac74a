"""Batches of logits with mixed parameters per row for distribution_stats, and comparisons of its results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


def parameters(rows: int, t: float = 1.0, k: int = 0, p: float = 1.0, m: float = 0.0) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), t),
        torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), p),
        torch.full((rows,), m),
    )


@st.composite
def batches(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple[Tensor, ...]:
    """Draws vocabularies of any size, ties, forbidden tokens, NaN rows, padding, and mixed parameters per row."""
    rows = draw(st.integers(0, 5))
    vocab = draw(st.sampled_from([1, 2, 3, 5, 16, 17, 33, 100, 1000, 1025, 2051, 3001]))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**32 - 1))
    g = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from([0.0, 0.3, 2.0, 12.0]))
    level = torch.randn(rows, vocab + draw(st.sampled_from([0, 1, 7])), generator=g, dtype=torch.float64) * scale
    if draw(st.booleans()):
        level = (level * 4).round() / 4  # many ties
    if draw(st.booleans()):
        level[torch.rand(level.shape, generator=g) < draw(st.sampled_from([0.1, 0.9]))] = -INF
    level = level.to(dtype)
    for row in range(rows):
        oddity = draw(st.sampled_from(["none"] * 6 + ["nan", "inf", "forbidden", "masked start", "smallest"]))
        if oddity == "nan":
            level[row, draw(st.integers(0, vocab - 1))] = float("nan")
        elif oddity == "inf":
            level[row, draw(st.integers(0, vocab - 1))] = INF
        elif oddity == "forbidden":
            level[row] = -INF
        elif oddity == "masked start":
            level[row, : vocab // 2] = torch.finfo(dtype).min
        elif oddity == "smallest":
            level[row] = torch.finfo(dtype).min

    def column(choices: list[float], kind: torch.dtype) -> Tensor:
        return torch.tensor([draw(st.sampled_from(choices)) for _ in range(rows)], dtype=kind)

    temperature = column([0.0, 1.0, 1.0, 0.7, 0.1, 5.0, 100.0], torch.float32)
    top_k = column([0, 0, 1, 2, 7, 50, vocab - 1, vocab, 10**6], torch.int32)
    top_p = column([1.0, 1.0, 0.9, 0.5, 1e-6, 0.99999, 0.25], torch.float32)
    min_p = column([0.0, 0.0, 0.05, 1.0, 1e-5, 0.5], torch.float32)
    return level[:, :vocab], temperature, top_k.clamp(min=0), top_p, min_p


def compare(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    tolerance = 1e-12 if want[1].dtype == torch.float64 else 6e-7
    assert torch.equal(got[1].isnan(), want[1].isnan())
    torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[3], want[3])

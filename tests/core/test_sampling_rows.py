"""TokenDistributions.of and from_probs, and the numbers per row that they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles.distributions import dist

from specdec_fast import TokenDistributions
from specdec_fast.core.sampling_rows import sampling_rows

CPU = torch.device("cpu")


def test_of_is_the_distribution_of_sampling_params() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed: dict[str, Any] = {"temperature": [1.0, 0.0, 0.5, 2.0], "top_k": torch.tensor([0, 5, -1, 7]), "top_p": 0.9}
    for settings in ({}, {"temperature": 0.0}, {"top_k": 3, "min_p": 0.1}, mixed):
        found = TokenDistributions.of(logits, **settings)
        found.check(30)
        for row in range(4):
            own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            own |= {name: float(torch.as_tensor(value).expand(4)[row]) for name, value in settings.items()}
            want = dist(logits[row].numpy(), own["temperature"], max(int(own["top_k"]), 0), own["top_p"], own["min_p"])
            assert np.allclose(found.probs()[row].numpy(), want, atol=1e-7), (settings, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_from_probs_gives_them_back(dtype: torch.dtype) -> None:
    probs = torch.randn(5, 40, generator=torch.Generator().manual_seed(2)).softmax(-1)
    probs[:, ::3] = 0
    given = (probs / probs.sum(1, keepdim=True)).to(dtype)
    found = TokenDistributions.from_probs(given)
    found.check(40)
    back, exact = found.probs().double(), given.double() / given.double().sum(1, keepdim=True)
    assert torch.allclose(back, exact, atol=1e-6) and bool((back[:, ::3] == 0).all())
    assert torch.equal(back.argmax(1), given.argmax(1))
    assert torch.equal(found.select(torch.tensor([3])).probs(), found.probs()[3:4])
    certain = TokenDistributions.from_probs(torch.eye(3)).probs()
    assert torch.equal(certain, torch.eye(3))


@pytest.mark.parametrize(
    ("probs", "words"),
    [
        (torch.tensor([[0.5, 0.6]]), r"probs\[0\]: got numbers from 0.5 that add up to 1.1"),
        (torch.tensor([[0.5, 0.5], [-0.1, 1.1]]), r"probs\[1\]: got numbers from -0.1"),
        (torch.tensor([[torch.nan, 1.0]]), r"probs\[0\]: got numbers from nan"),
        (torch.tensor([[0.0, 0.0]]), r"pass logits.softmax\(-1\), or normalise the row"),
        (torch.ones(3), r"probs is \[3\]; expected a tensor \[R, V\]"),
    ],
)
def test_what_is_no_distribution(probs: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenDistributions.from_probs(probs)
    if probs.dim() == 2:
        TokenDistributions.from_probs(probs, check=False)


def test_numbers_of_rows() -> None:
    temperature, top_k, top_p, min_p = sampling_rows(2, CPU, [0.5, 0], -1, torch.tensor(0.9), torch.tensor([0, 1]))
    assert temperature.tolist() == [0.5, 0.0] and top_k.tolist() == [0, 0] and min_p.tolist() == [0.0, 1.0]
    assert [part.dtype for part in (temperature, top_k, top_p, min_p)] == [
        torch.float32,
        torch.int32,
        torch.float32,
        torch.float32,
    ]
    with pytest.raises(ValueError, match=r"top_p: got \[3\] values; expected one number, or a sequence or tensor of 2"):
        sampling_rows(2, CPU, top_p=[1.0, 1.0, 1.0])
    for name, value in (("top_k", 1.5), ("temperature", 1e-5), ("top_p", 1.1), ("min_p", float("inf"))):
        with pytest.raises(ValueError, match=f"{name}: got {value}"):
            sampling_rows(2, CPU, **{name: value})  # type: ignore[arg-type]

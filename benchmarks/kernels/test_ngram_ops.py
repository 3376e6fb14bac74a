"""Cost of ngram_match over long histories: the C++ op beside its reference.

The last match of a text that repeats nothing is the dearest case: every place is looked at.
"""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import ngram_match, use_backend


@pytest.mark.parametrize("frequent", [False, True], ids=["last", "frequent"])
@pytest.mark.parametrize("length", [1024, 32768])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_ngram_match(benchmark, backend: str, length: int, frequent: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 2000, (length,), generator=generator)
    starts, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([length], dtype=torch.int32)
    with use_backend(backend), torch.inference_mode():
        benchmark(ngram_match, text, starts, lengths, 4, 2, 8, frequent)

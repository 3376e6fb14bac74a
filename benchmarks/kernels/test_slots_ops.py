"""Cost of kv_slots, called once per forward pass: the C++ op beside its reference."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import kv_slots, use_backend


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_kv_slots(benchmark, backend: str, batch: int) -> None:
    table = torch.arange(1, 8 * 64 + 1, dtype=torch.int32).view(8, 64)
    lengths = torch.full((8,), 300, dtype=torch.int32)
    rows, offsets = torch.arange(batch, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * 5
    with use_backend(backend), torch.inference_mode():
        benchmark(kv_slots, table, lengths, rows, offsets, None, batch * 5, 16)

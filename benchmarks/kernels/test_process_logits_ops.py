"""Price of penalties, bias and masks (process_logits) on the CPU, beside one plain read (sum) of the same logits.

    python -m pytest benchmarks/kernels/test_process_logits_ops.py

Ratios of minima of one run, taken in turns; absolute times of a shared machine mean little. `make bench` times each
logits processor beside the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    ALWAYS,
    Additions,
    NodePaths,
    Penalties,
    TokenMasks,
    process_logits,
    process_logits_overlay,
    use_backend,
)
from specdec_kernels.dispatch import extension

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")

VOCAB, ROWS, NODES, HISTORY = 151_936, 4, 16, 1000


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(kind: str) -> tuple[Tensor, dict[str, Any]]:
    """Returns logits of ROWS random trees, and the arguments of one kind of logits processor."""
    source = torch.Generator().manual_seed(0)

    def random_ids(*shape: int) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=source)

    parents = [parent for _ in range(ROWS) for parent in (-1, *(node // 2 for node in range(NODES - 1)))]
    paths = NodePaths(
        random_ids(ROWS * NODES),
        int32(parents),
        int32([NODES * row for row in range(ROWS + 1)]),
        int32([HISTORY] * ROWS),
    )
    ids = torch.stack([torch.randperm(VOCAB, generator=source)[:HISTORY] for _ in range(ROWS)]).to(torch.int32)
    processors: dict[str, Any] = {
        "penalties": Penalties(
            torch.tensor([[1.1, 0.2, 0.1]] * ROWS),
            int32(range(ROWS)),
            ids,
            torch.ones_like(ids),
            int32([HISTORY] * ROWS),
        ),
        "additions": Additions(
            int32([20 * row for row in range(ROWS + 1)]),
            random_ids(20 * ROWS).to(torch.int32),
            torch.full((20 * ROWS,), float("-inf")),
            int32([ALWAYS] * 20 * ROWS),
        ),
        "masks": TokenMasks(
            torch.randint(-(2**31), 2**31, (ROWS * NODES, -(-VOCAB // 32)), generator=source).to(torch.int32),
            torch.arange(ROWS * NODES, dtype=torch.int32),
        ),
    }
    arguments = processors if kind == "all" else {kind: processors[kind]}
    return torch.randn(ROWS * NODES, VOCAB, generator=source), {"paths": paths, **arguments}


def in_turns(one: Callable[[], Any], other: Callable[[], Any], rounds: int = 12) -> tuple[float, float]:
    best = [float("inf")] * 2
    for _ in range(rounds):
        for at, run in enumerate((one, other)):
            start = time.perf_counter()
            run()
            best[at] = min(best[at], time.perf_counter() - start)
    return best[0], best[1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["penalties", "additions", "masks", "all"])
def test_price_of_edits(kind: str, record_property: Callable[[str, object], None]) -> None:
    logits, processors = call(kind)
    ours, read = in_turns(lambda: process_logits(logits, **processors), logits.sum)
    record_property("microseconds", ours * 1e6)
    print(f"\n{kind}: {ours * 1e6:.0f} us, {ours / read:.2f} of a plain read of [{ROWS * NODES}, {VOCAB}] float32")
    assert ours < {"penalties": 2.0, "additions": 0.5}.get(kind, 12.0) * read


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["penalties", "additions", "masks", "all"])
def test_process_logits(benchmark: Any, kind: str, backend: str) -> None:
    logits, processors = call(kind)
    with use_backend(backend), torch.inference_mode():
        benchmark.pedantic(process_logits, (logits,), processors, rounds=5, warmup_rounds=1)


def test_process_logits_overlay(benchmark: Any) -> None:
    """Logits processors as an overlay on the rows of one tree, by the reference; a GPU has a kernel for it."""
    logits, processors = call("additions")
    paths = replace(processors.pop("paths"), nodes=torch.arange(NODES, dtype=torch.int32))
    with use_backend("reference"), torch.inference_mode():
        benchmark.pedantic(process_logits_overlay, (logits[:NODES], paths), processors, rounds=2)

"""Speed of growing trees outside the model: tree_expand and tree_grow beside their references.

    python -m pytest benchmarks/kernels/test_expand_ops.py -s

Machines share caches and ports with other work: trust ratios of one run and minima, not absolute times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import Growth, tree_expand, tree_grow, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.testing.samples_verify import grow

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built"),
]


def best_of(call: Callable[[], Any], rounds: int = 40) -> float:
    """Least seconds of a call."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def level_of_eight(vocab: int, noisy: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Eight nodes of one tree with eight children each, the eight best kept."""
    logits = torch.randn(8, vocab) * 2
    one = torch.ones(8)
    given: dict[str, Any] = {
        "inv_t": one,
        "cut": one * -torch.inf,
        "tie_id": torch.full((8,), vocab - 1, dtype=torch.int32),
        "offsets": torch.tensor([0, 8], dtype=torch.int32),
        "scores": torch.zeros(8),
        "width": 8,
        "keep": 8,
    }
    if noisy:
        given |= {"seeds": torch.arange(8), "positions": torch.arange(8, dtype=torch.int32)}
    return logits, given


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("vocab", [1024, 32_000, 151_936])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noise"])
def test_tree_expand(benchmark: Any, vocab: int, noisy: bool, backend: str) -> None:
    logits, given = level_of_eight(vocab, noisy)
    with use_backend(backend), torch.inference_mode():
        benchmark.pedantic(tree_expand, (logits,), given, rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("vocab", [1024, 32_000, 151_936])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noise"])
def test_one_level_of_eight_nodes(vocab: int, noisy: bool) -> None:
    logits, given = level_of_eight(vocab, noisy)
    kernel = best_of(lambda: tree_expand(logits, **given))
    with use_backend("reference"):
        reference = best_of(lambda: tree_expand(logits, **given), rounds=5)
    print(
        f"\ntree_expand {vocab:>7} tokens, noise {noisy}: {1e6 * kernel:8.1f} us, reference x{reference / kernel:.1f}"
    )
    assert kernel < reference


@pytest.mark.parametrize("vocab", [1024, 32_000])
def test_one_level_of_trees_that_keep_the_best(vocab: int) -> None:
    """The level below the roots of eight trees: children, the best of them, packed trees and their plan."""
    call = grow(Sizes(rows=8, vocab=vocab))
    kernel = best_of(lambda: tree_grow(*call.arguments, **call.options))
    with use_backend("reference"):
        reference = best_of(lambda: tree_grow(*call.arguments, **call.options), rounds=5)
    print(f"\ntree_grow {vocab:>7} tokens: {1e6 * kernel:8.1f} us, reference x{reference / kernel:.1f}")
    assert kernel < reference


@pytest.mark.parametrize("vocab", [1024, 32_000])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noise"])
def test_a_whole_tree_of_64_nodes(benchmark: Any, vocab: int, noisy: bool) -> None:
    """Six levels of up to eight nodes, eight children of each looked at, the 64 best kept: growth without staging."""
    levels, keep = 6, 64
    growth = Growth.room(torch.tensor([keep], dtype=torch.int32), keep, levels)
    growth.tokens[:, 0] = 1
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0)) * 4
    dist = torch.ones(8), torch.full((8,), -torch.inf), torch.full((8,), vocab - 1, dtype=torch.int32)
    noise: dict[str, Any] = {}
    if noisy:
        noise = {"seeds": torch.tensor([5]), "positions": torch.tensor([7], dtype=torch.int32)}
    given = [
        (logits[:nodes], *(part[:nodes] for part in dist), torch.tensor([0, nodes], dtype=torch.int32))
        for nodes in range(9)
    ]
    nodes = [1]  # that grow on each level

    def grow_all() -> int:
        had = 1
        for level in range(levels):
            last = level == levels - 1
            counts = tree_grow(*given[nodes[level]], growth, level=level, width=8, last=last, **noise)[2]
            if not last and len(nodes) <= level + 1:
                nodes.append(int(counts[0, 0]) - had)
                had += nodes[-1]
        return int(counts[0, 0]) - 1

    assert grow_all() == keep
    with use_backend("reference"):
        reference = best_of(grow_all, rounds=5)
    assert best_of(grow_all) < reference
    benchmark.extra_info |= {"nodes": keep, "reference_us": round(1e6 * reference, 1)}
    benchmark(grow_all)

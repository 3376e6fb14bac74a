"""Cost of the operators of recurrent layers at the shape of a layer of Qwen3-Next.

It has 16 groups, 32 heads and states 128 x 128. States of several layers take turns, so each comes from memory. Nodes
are one, a chain, a tree and roots. One more root costs a row of products with a state in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from specdec_kernels import state_commit, tree_conv, tree_delta, tree_ssm, use_backend, window_commit

GROUPS, HEADS, SIZE, LAYERS = 16, 32, 128, 24
CHANNELS, REACH = 2 * GROUPS * SIZE + HEADS * SIZE, 4
NODES: dict[str, tuple[int, list[int] | None]] = {
    "1 node": (1, None),
    "8 in a chain": (8, None),
    "8 in a tree": (8, [-1, 0, 0, 1, 1, 2, 2, 3]),
    "8 roots": (8, [-1] * 8),
}


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def vectors(nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key = (normalize(torch.randn(nodes, GROUPS, SIZE), dim=-1).bfloat16() for _ in range(2))
    value = torch.randn(nodes, HEADS, SIZE).bfloat16()
    return query * SIZE**-0.5, key, value, -torch.rand(nodes, HEADS), torch.rand(nodes, HEADS).bfloat16()


def batch(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    nodes, parents = NODES[kind]
    return int32([0]), int32([9]), int32([0, nodes]), None if parents is None else int32(parents)


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tree_delta(benchmark, backend: str, kind: str, threads: int) -> None:
    states = [torch.randn(1, HEADS, SIZE, SIZE) for _ in range(LAYERS)]
    inputs, where = vectors(NODES[kind][0]), batch(kind)
    benchmark.extra_info["calls"] = LAYERS
    with use_backend(backend), torch.inference_mode():
        benchmark(lambda: [tree_delta(*inputs, state, *where) for state in states])


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tree_ssm(benchmark, backend: str, kind: str, threads: int) -> None:
    states = [torch.randn(1, HEADS, SIZE, SIZE) for _ in range(LAYERS)]
    inputs, where = vectors(NODES[kind][0])[:4], batch(kind)
    benchmark.extra_info["calls"] = LAYERS
    with use_backend(backend), torch.inference_mode():
        benchmark(lambda: [tree_ssm(*inputs, state, *where) for state in states])


@pytest.mark.parametrize("accepted", [1, 4])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_state_commit(benchmark, backend: str, accepted: int, threads: int) -> None:
    states = [torch.randn(1, HEADS, SIZE, SIZE) for _ in range(LAYERS)]
    _, key, value, gate, _ = vectors(8)
    where = (int32([0]), int32([9]), int32([list(range(accepted))]))
    benchmark.extra_info["calls"] = LAYERS
    with use_backend(backend), torch.inference_mode():
        benchmark(lambda: [state_commit(state, key, value.float(), gate, *where) for state in states])


@pytest.mark.parametrize("kind", ["1 node", "8 in a tree"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tree_conv(benchmark, backend: str, kind: str, threads: int) -> None:
    windows = [torch.randn(1, REACH - 1, CHANNELS).bfloat16() for _ in range(LAYERS)]
    inputs, weight = torch.randn(NODES[kind][0], CHANNELS).bfloat16(), torch.randn(CHANNELS, REACH).bfloat16()
    where = batch(kind)
    benchmark.extra_info["calls"] = LAYERS
    with use_backend(backend), torch.inference_mode():
        benchmark(lambda: [tree_conv(inputs, weight, None, each, *where, "silu") for each in windows])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_window_commit(benchmark, backend: str, threads: int) -> None:
    windows = [torch.randn(1, REACH - 1, CHANNELS).bfloat16() for _ in range(LAYERS)]
    inputs, where = torch.randn(8, CHANNELS).bfloat16(), (int32([0]), int32([9]), int32([[0, 1, 2]]))
    benchmark.extra_info["calls"] = LAYERS
    with use_backend(backend), torch.inference_mode():
        benchmark(lambda: [window_commit(each, inputs, *where) for each in windows])

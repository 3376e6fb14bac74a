"""The noise inside kernels: the words and the float bits of `random.py`, for keys and counters of every size."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import random

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from specdec_kernels.triton_shared.random import accept_uniform, exponential, gumbel, gumbel_span, uniform  # noqa: E402


@triton.jit
def variates(words, out, count: tl.constexpr):
    ids = tl.arange(0, count)
    word = tl.load(words + ids).to(tl.uint32, bitcast=True)
    tl.store(out + ids, exponential(word))
    tl.store(out + count + ids, gumbel(word))
    tl.store(out + 2 * count + ids, uniform(word))


def test_variates_have_the_bits_of_the_definition() -> None:
    edges = [0, 1, 2, 255, 2**23, 2**24 + 1, 2**29 - 1, 2**29, 2**29 + 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    word = torch.cat([torch.tensor(edges), torch.randint(0, 2**32, (2048 - len(edges),))])
    out = torch.zeros(3, 2048)
    variates[(1,)](torch.where(word >= 2**31, word - 2**32, word).int(), out, 2048)
    want = torch.stack([random.exponential(word), random.gumbel(word), random.uniform(word)])
    assert torch.equal(out.view(torch.int32), want.view(torch.int32))


@triton.jit
def keyed(seeds, positions, index, out, uniforms, count: tl.constexpr):
    row = tl.program_id(0)
    seed, position, number = tl.load(seeds + row), tl.load(positions + row), tl.load(index + row)
    for half in range(2):
        first = half * count
        noise = gumbel_span(seed, position, number, 3, first, count)
        tl.store(out + row * 2 * count + first + tl.arange(0, count), noise)
    tl.store(uniforms + row, accept_uniform(seed, position, number))


def test_spans_and_uniforms_have_the_usual_keys() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions = torch.tensor([0, 1, 5, 2**31 - 1, 77, 2**30], dtype=torch.int32)
    index = torch.tensor([0, 3, 2**31 - 1, 9, 64, 1], dtype=torch.int32)
    out, uniforms = torch.zeros(6, 1024), torch.zeros(6)
    keyed[(6,)](seeds, positions, index, out, uniforms, 512)
    assert torch.equal(out, random.gumbel(random.span_words(seeds, positions, index, 3, 1024)))
    assert torch.equal(uniforms, random.uniform(random.words(seeds, positions, index, random.ACCEPT, 0)))

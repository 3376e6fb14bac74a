"""Rough totals of rows of logits: decisions of rejection_verify_logits by them equal those by distributions."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from oracles.chain_cases import INF, plain

from specdec_kernels import distribution_stats, draft_sample, rejection_verify, rejection_verify_logits, use_backend
from specdec_kernels.dispatch import extension

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "rows"), [(5, 6000), (16, 6000), (67, 6000), (9000, 150)])
@pytest.mark.parametrize("draft", ["sampled", "equal", "deterministic"])
def test_rough_totals_decide_as_the_distributions_do(draft: str, vocab: int, rows: int, dtype: torch.dtype) -> None:
    """Rule `rejection` may decide a uniform without the distribution. With thousands of uniforms, hundreds of them
    within a hundredth of their threshold, and levels that rough totals cannot represent, results equal those of the
    distributions.
    """
    torch.manual_seed(vocab)
    count = rows * 4
    level = (torch.randn(count, vocab) * 2 + torch.randn(count, 1) * 10).to(dtype)
    for at, value in enumerate([float("nan"), INF, -INF, 60000.0, -60000.0]):
        level[50 + at :: 97, at] = value
        level[70 + at :: 89, -1 - at] = value  # after places where a total may have been enough
    for at, value in enumerate([-116.0, -117.5, -118.2]):  # near the lower end of a total's range
        level[90 + at :: 83, -1 - at] = value + level[90 + at :: 83, 0]
    temperature = torch.ones(count)
    for at, value in enumerate([0.3, 0.7, 1.7, 1e-6, 0.0, 1e6]):
        temperature[at::41] = value
    settings = (temperature, *plain(count)[1:])
    guess = level if draft == "equal" else (level.float() + 0.5 * torch.randn(count, vocab)).to(dtype)
    if draft != "equal":  # the upper end: no draft is sampled there, so sampled ones are far below
        for at, value in enumerate([57.0, 59.0, 61.0, 90.0]):
            level[110 + at :: 83, -1 - at] = value + level[110 + at :: 83, 0]
    order, offsets = torch.arange(count), torch.arange(0, count + 1, 4, dtype=torch.int32)
    own = (guess, *distribution_stats(guess, *settings))
    dist_index, kinds = (order - 1).clamp(min=0).int(), torch.full((count,), draft != "deterministic", dtype=torch.int8)
    chain = (draft_sample(*own, order, order.int(), order.int()).roll(1), offsets, kinds, dist_index)
    noise = (own, None, order[:rows], torch.zeros(rows, dtype=torch.int32))
    with use_backend("cpu"):
        want = rejection_verify(*chain, (level, *distribution_stats(level, *settings)), *noise, max_depth=3)
        got = rejection_verify_logits(*chain, level, settings, *noise, max_depth=3)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want, strict=True))
    if draft == "sampled":
        assert (want[1].bincount(minlength=4) > rows / 100).all(), "paths of all lengths"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bonus_token_of_rough_totals_is_that_of_the_distribution(dtype: torch.dtype, threads: int) -> None:
    """If nothing was rejected, a draw may not need the distribution: bounds of block masses tell which blocks can win.
    The cases are flat distributions, where many can, steep ones, and a level far above the first ones of its row,
    which a rough total cannot represent.
    """
    torch.manual_seed(threads)
    rows, vocab = 240, 40_000
    level = torch.randn(rows, vocab) * torch.tensor([0.01, 0.5, 2.0, 8.0]).repeat(rows // 4)[:, None]
    level[7::40, 30_000] = 100.0
    level[9::40, 20_000:] = -INF
    level[11::40, :2000] = -INF
    level[13::40, 5] = float("nan")
    level, settings = level.to(dtype), plain(rows)
    alone = torch.arange(rows + 1, dtype=torch.int32)  # roots: every path ends at their distribution
    chain = (torch.zeros(rows, dtype=torch.int64), alone, torch.zeros(rows, dtype=torch.int8), alone[:-1])
    noise = (None, None, torch.arange(rows), alone[:-1])
    stats = distribution_stats(level, *settings, masses=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with use_backend("cpu"):
            want = rejection_verify(*chain, (level, *stats[:4]), *noise, max_depth=0, mass=stats[4])
            got = rejection_verify_logits(*chain, level, settings, *noise, max_depth=0)
            few = [  # one chain, whose rows threads share
                rejection_verify_logits(
                    chain[0][at : at + 1], alone[:2], chain[2][:1], alone[:1], level[at : at + 1], plain(1), None, None,
                    noise[2][at : at + 1], alone[at : at + 1], max_depth=0,
                )
                for at in range(0, rows, 5)
            ]  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[2], want[2]) and torch.equal(torch.cat([one[2] for one in few]), want[2][::5])
    broken = stats[1].isnan()
    assert broken.sum() == 6 and got[4][broken].isnan().all()
    without = int(got[4].isposinf().sum())
    rough = "AVX" in torch.backends.cpu.get_cpu_capability() and os.environ.get("SPECDEC_ISA") != "portable"
    assert without == (rows - 18 if rough else 0), "no distribution was needed"


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_rough_totals_of_every_instruction_set(isa: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "rough_totals_decide or a_bonus",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SPECDEC_ISA": isa})
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout


def test_a_rough_total_is_not_a_mass() -> None:
    """Blocks of equal mass whose rough totals are exact and 6 % too large in turns: draws follow the masses."""
    rows, blocks = 400, 40
    even = torch.arange(blocks) % 2 == 0
    # levels that are powers of two, and levels where the chord has its largest error
    level = torch.where(even, 0.0, 0.4712 * math.log(2)).repeat_interleave(1024).repeat(rows, 1)
    alone = torch.arange(rows + 1, dtype=torch.int32)
    chain = (torch.zeros(rows, dtype=torch.int64), alone, torch.zeros(rows, dtype=torch.int8), alone[:-1])
    noise = (None, None, torch.arange(rows) + 5000, alone[:-1])
    stats = distribution_stats(level, *plain(rows), masses=True)
    with use_backend("cpu"):
        want = rejection_verify(*chain, (level, *stats[:4]), *noise, max_depth=0, mass=stats[4])[2]
        got = rejection_verify_logits(*chain, level, plain(rows), *noise, max_depth=0)
    assert torch.equal(got[2], want)

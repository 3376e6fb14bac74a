"""distribution_stats against its reference, an independent sort and transformers' warpers, and at the edges of its
domain.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.distribution_batches import DTYPES, INF, batches, compare, parameters
from torch import Tensor

from specdec_kernels import distribution_stats, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.distribution_stats import dist_probs

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@quick
@given(batches())
def test_extension_equals_reference(batch: tuple[Tensor, ...]) -> None:
    with use_backend("reference"):
        *want, mass = distribution_stats(*batch, masses=True)
    with use_backend("cpu"):
        *got, cpu_mass = distribution_stats(*batch, masses=True)
        plain = distribution_stats(*batch)
    compare(got, want)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(got, plain, strict=True))
    tolerance = 1e-12 if mass.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(cpu_mass, mass, rtol=tolerance, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masses_are_the_sums_of_blocks_and_unknown_where_there_is_a_cut(backend: str) -> None:
    level = torch.randn(5, 2500) * 4
    level[0, 1024:2048] = -INF  # a block of forbidden tokens
    level[0, 3] = 90.0  # and one that outweighs the row
    t, k, p, m = parameters(5)
    t[1], k[2], p[3], m[4] = 0.0, 7, 0.5, 0.1
    with use_backend(backend):
        *stats, mass = distribution_stats(level, t, k, p, m, masses=True)
    weights = dist_probs(level, *stats)[0]
    want = torch.stack([weights[:1024].sum(), weights[1024:2048].sum(), weights[2048:].sum()])
    torch.testing.assert_close(mass[0], want, rtol=1e-5, atol=1e-30)
    assert mass.shape == (5, 3) and mass[1:].isnan().all()
    assert distribution_stats(level[:0], *(part[:0] for part in (t, k, p, m)), masses=True)[4].shape == (0, 3)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_keep_their_precision_at_all_levels(dtype: torch.dtype, threads: int) -> None:
    """Rows that rise, fall, jump and end inside a block: each makes the sums change their unit or method."""
    vocab = 40 * 1024 + 77
    ramp = torch.linspace(0, 1, vocab, dtype=torch.float64)
    torch.manual_seed(3)
    rows = [
        torch.randn(vocab) * 3,
        ramp * 400,
        -ramp * 400,
        ramp * 400 - 350 + torch.randn(vocab),
        torch.where(ramp < 0.6, -INF, torch.randn(vocab)),
        torch.where(torch.rand(vocab) < 0.01, -INF, torch.randn(vocab) * 2),
        torch.where(ramp > 0.97, 180.0, -180.0),
        torch.full((vocab,), -700.0),
        torch.where(torch.arange(vocab) == vocab - 1, 200.0, torch.randn(vocab)),
    ]
    level = torch.stack([row.double() for row in rows]).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for t in (1.0, 0.31, 7.0):
            with use_backend("cpu"):
                _, lse, _, _, mass = distribution_stats(level, *parameters(len(rows), t), masses=True)
            scaled = level.to(lse.dtype) * (1 / torch.tensor(t).to(lse.dtype))
            exact = scaled.double().logsumexp(1)
            tolerance = 1e-12 if dtype == torch.float64 else 6e-7
            torch.testing.assert_close(lse.double(), exact, rtol=tolerance, atol=tolerance)
            for row in range(len(rows)):
                blocks = (scaled[row].double() - exact[row]).exp().split(1024)
                want = torch.stack([block.sum() for block in blocks])
                # levels far from the heaviest carry the rounding of level times 1 / T
                torch.testing.assert_close(mass[row].double(), want, rtol=max(2e-4, tolerance), atol=1e-30)
    finally:
        torch.set_num_threads(before)


def by_sorting(level: np.ndarray, t: float, k: float, p: float, m: float) -> tuple[np.ndarray, bool]:
    """Returns the probabilities of one row by sorting, and whether a decision is too close to compare."""
    order = np.lexsort((np.arange(len(level)), -level))
    z = (level[order] * (np.float32(1) / np.float32(t))).astype(np.float32).astype(np.float64)
    mass = np.exp(z - z[0])
    close = False
    if 0 < k < len(level):
        mass[int(k) :] = 0
    if p < 1:
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        gap = before - np.float32(p) * mass.sum()
        close |= bool((np.abs(gap) < 1e-9 * mass.sum()).any())
        mass[gap >= 0] = 0
    close |= bool((np.abs(mass - np.float32(m)) < 1e-9).any()) and m not in (0.0, 1.0)
    mass[mass < np.float32(m)] = 0
    out = np.zeros(len(level))
    out[order] = mass / mass.sum()
    return out, close


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 40, 777, 2500]), st.booleans())
def test_weights_equal_an_independent_sort(backend: str, seed: int, vocab: int, ties: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = 6
    level = torch.randn(rows, vocab, generator=g) * 3
    if ties:
        level = (level * 2).round() / 2

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

    t, p, m = pick(0.5, 1.0, 1.7), pick(1.0, 0.9, 0.4), pick(0.0, 0.02, 0.3)
    k = pick(0, 1, 5, vocab // 2, 3 * vocab).int()
    with use_backend(backend):
        stats = distribution_stats(level, t, k, p, m)
    got = dist_probs(level, *stats)
    for row in range(rows):
        want, close = by_sorting(level[row].numpy(), *(float(x[row]) for x in (t, k, p, m)))
        if not close:
            assert np.array_equal(got[row].numpy() > 0, want > 0)
        np.testing.assert_allclose(got[row].numpy(), want, rtol=2e-5, atol=1e-6 if close else 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_equal_the_warpers_of_transformers(backend: str) -> None:
    from transformers.generation import logits_process as warpers

    level = torch.randn(40, 300) * 3
    for t, k, p, m in [
        (1.0, 20, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 50, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 60, 0.95, 0.03),
    ]:
        scores = warpers.TemperatureLogitsWarper(t)(None, level.double())
        if k:
            scores = warpers.TopKLogitsWarper(k)(None, scores)
        if p < 1:
            scores = warpers.TopPLogitsWarper(p)(None, scores)
        if m:
            scores = warpers.MinPLogitsWarper(m)(None, scores)
        with use_backend(backend):
            stats = distribution_stats(level, *parameters(40, t, k, p, m))
        torch.testing.assert_close(dist_probs(level, *stats).double(), scores.softmax(-1), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_normaliser_is_as_exact_as_torch(backend: str, dtype: torch.dtype) -> None:
    level = (torch.randn(6, 5001, dtype=torch.float64) * torch.tensor([0.1, 1, 3, 10, 30, 100.0])[:, None]).to(dtype)
    exact = level.double().logsumexp(1)
    with use_backend(backend):
        lse = distribution_stats(level, *parameters(6))[1]
    own = (level.to(lse.dtype).logsumexp(1).double() - exact).abs()
    last_place = torch.finfo(lse.dtype).eps * exact.abs() * (2 if dtype == torch.float64 else 1)
    assert ((lse.double() - exact).abs() <= 2 * own + last_place).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows(backend: str) -> None:
    level = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-INF, -5.0, -INF, -5.0]])
    with use_backend(backend):
        inv_t, lse, cut, tie_id = distribution_stats(level, *parameters(2, t=0.0, k=3, p=0.5, m=0.5))
    assert inv_t.tolist() == [0, 0] and lse.tolist() == [0, 0]
    assert cut.tolist() == [3.0, -5.0] and tie_id.tolist() == [1, 1]
    assert dist_probs(level, inv_t, lse, cut, tie_id).tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", [0.0, 1.0])
def test_rows_without_a_distribution_are_marked(backend: str, t: float) -> None:
    level = torch.tensor([[1.0, float("nan"), 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF]])
    with use_backend(backend):
        inv_t, lse, cut, tie_id = distribution_stats(level, *parameters(3, t=t, k=2, p=0.9, m=0.1))
    assert lse.isnan().all() and cut.isnan().all() and tie_id.tolist() == [0, 0, 0]
    assert inv_t.tolist() == [t] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_keep_the_lower_ids(backend: str) -> None:
    level = torch.zeros(3, 6)
    level[:, 5] = 1.0
    t, _, p, m = parameters(3)
    k = torch.tensor([3, 0, 0], dtype=torch.int32)
    p[1], m[2] = 0.5, 1.0
    with use_backend(backend):
        stats = distribution_stats(level, t, k, p, m)
    kept = dist_probs(level, *stats) > 0
    # e / (e + 5) = 0.352, then 0.1296 each: two zeros are needed to reach one half
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1, 5], [0, 1, 5], [5]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_vocabularies(backend: str, threads: int) -> None:
    level = torch.randn(4, 70_001) * 2
    level[1] = (level[1] * 8).round() / 8
    level[3, :40_000] = -INF
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for k, p, m in [
            (0, 1.0, 0.0),
            (40, 1.0, 0.0),
            (30_000, 1.0, 0.0),
            (0, 0.9, 0.0),
            (20_000, 0.97, 1e-4),
            (0, 1.0, 1e-3),
        ]:
            with use_backend(backend):
                got = distribution_stats(level, *parameters(4, 0.9, k, p, m))
            with use_backend("reference"):
                compare(got, distribution_stats(level, *parameters(4, 0.9, k, p, m)))
    finally:
        torch.set_num_threads(before)


BAD = [
    ("temperature", {"t": -1.0}, "0 (greedy)"),
    ("temperature", {"t": float("nan")}, "0 (greedy)"),
    ("temperature", {"t": 1e-9}, "0 (greedy)"),
    ("top_k", {"k": -1}, "0 turns top-k off"),
    ("top_p", {"p": 0.0}, "1 turns top-p off"),
    ("top_p", {"p": 1.5}, "1 turns top-p off"),
    ("min_p", {"m": -0.1}, "0 turns min-p off"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "values", "remedy"), BAD)
def test_bad_parameters_are_named(backend: str, name: str, values: dict[str, float], remedy: str) -> None:
    with use_backend(backend), pytest.raises(ValueError, match=name) as error:
        distribution_stats(torch.zeros(2, 3), *parameters(2, **values))  # type: ignore[arg-type]
    assert remedy in str(error.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_tensors_are_named(backend: str) -> None:
    good = parameters(2)
    with use_backend(backend):
        for logits in (
            torch.zeros(3),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(3, 2).T,
            torch.zeros(2, 0),
        ):
            with pytest.raises(ValueError, match=r"logits.*expected"):
                distribution_stats(logits, *good)
        with pytest.raises(ValueError, match=r"top_k.*torch.int32"):
            distribution_stats(torch.zeros(2, 3), good[0], good[1].long(), *good[2:])
        with pytest.raises(ValueError, match=r"top_p.*shape"):
            distribution_stats(torch.zeros(2, 3), *good[:2], torch.ones(3), good[3])
        expanded = tuple(part[:1].expand(2) for part in good)  # strides of zero are fine
        compare(distribution_stats(torch.zeros(2, 3), *expanded), distribution_stats(torch.zeros(2, 3), *good))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_gives_the_same_integers(isa: str) -> None:
    code = """
import torch
from specdec_kernels import rejection_verify, draft_sample, distribution_stats, replay_sample, use_backend
torch.manual_seed(0)
seeds, pos = torch.arange(6), torch.arange(6, dtype=torch.int32)
t, k = torch.tensor([0, 1, 1, 1, 0.5, 1]), torch.tensor([0, 0, 9, 0, 0, 0], dtype=torch.int32)
p, m = torch.tensor([1, 1, 1, 0.9, 1, 1]), torch.tensor([0, 0, 0, 0, 0, 0.01])
off, ones = torch.tensor([0, 3, 6], dtype=torch.int32), torch.ones(6, dtype=torch.int8)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    l = (torch.randn(6, 5003) * 3).to(dtype)
    l[:, ::7] = -float("inf")
    out = []
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            s = distribution_stats(l, t, k, p, m)
            d = draft_sample(l, *s, seeds, pos, pos)
            out.append([*s[2:], d, replay_sample(l, s[0], s[2], s[3], seeds, pos),
                        *rejection_verify(d, off, ones, pos, (l, *s), (l, *s), None, seeds[:2], pos[:2], max_depth=2)])
            lse = s[1]
    assert all(torch.equal(a, b) for a, b in zip(*out)), (dtype, out)
print("same")
"""
    environment = os.environ | {"SPECDEC_ISA": isa, "SPECDEC_BACKEND": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_late_peak_far_above_the_beginning_of_a_row(dtype: torch.dtype, top_k: int) -> None:
    """Around the largest power of two of a float, in either order."""
    gaps = torch.cat([torch.arange(55.0, 65.0, 0.05), torch.arange(80.0, 95.0, 0.1)])
    rows = len(gaps)
    for place in (0, 127, 128, 2000, 4095):
        logits = torch.zeros(rows, 4096)
        logits[:, place] = gaps
        batch = (logits.to(dtype), *parameters(rows, k=top_k))
        with use_backend("reference"):
            want = distribution_stats(*batch)
        with use_backend("cpu"):
            got = distribution_stats(*batch)
        assert not got[1].isnan().any()
        compare(got, want)

"""Ragged batches of draft chains for rejection_verify, and comparisons of thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import distribution_stats, draft_sample, rejection_verify, rejection_verify_logits, use_backend
from specdec_kernels.random import gumbel

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(rows: int, t: float = 1.0) -> tuple[Tensor, ...]:
    return torch.full((rows,), t), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)


def dist(logits: Tensor, t: float = 1.0) -> tuple[Tensor, ...]:
    return (logits, *distribution_stats(logits, *plain(len(logits), t)))


@st.composite
def verifications(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Draws ragged rows, deterministic and sampled nodes (some excluded by their distributions), four dtypes for each
    side, smaller and permuted draft vocabularies.
    """
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 4, 6]), max_size=4))
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    nodes = offsets[-1] + draw(st.integers(0, 2))
    vocab = draw(st.sampled_from([2, 3, 9, 33, 1000, 1024, 1025, 3000]))
    width = draw(st.sampled_from([vocab, vocab, max(1, vocab // 2)]))
    dists = draw(st.integers(1, 5))
    mapped = draw(st.sampled_from(["same", "sorted", "shuffled"]))
    token_ids = None
    if mapped != "same":
        token_ids = torch.randperm(vocab, generator=g)[:width]
        token_ids = token_ids.sort().values if mapped == "sorted" else token_ids

    def sampled(rows: int, columns: int) -> tuple[Tensor, ...]:
        def pick(*choices: float) -> Tensor:
            return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=g)]

        scale = draw(st.sampled_from([0.0, 1.0, 5.0]))
        level = torch.randn(rows, columns + 2, generator=g) * scale
        if draw(st.booleans()):
            level[torch.rand(level.shape, generator=g) < 0.5] = -INF
        if rows and draw(st.sampled_from([False, False, True])):
            level[int(torch.randint(0, rows, (1,), generator=g))] = float("nan")
        level = level.to(draw(st.sampled_from(dtypes)))[:, :columns]
        filters = (pick(0, 0, 5).int(), pick(1, 1, 0.8), pick(0, 0, 0.1)) if draw(st.booleans()) else plain(rows)[1:]
        parameters = (pick(0, 0.5, 1, 1), *filters)
        return parameters, level, *distribution_stats(level, *parameters, masses=True)

    sampling, *target, mass = sampled(nodes, vocab)
    _, *draft, _ = sampled(dists, width)
    dist_index = torch.randint(0, dists, (nodes,), generator=g, dtype=torch.int32)
    kinds = torch.randint(0, 2, (nodes,), generator=g, dtype=torch.int8)
    zero = torch.zeros(dists, dtype=torch.int32)
    drafted = draft_sample(*draft, torch.arange(dists), zero, zero)
    drafted = drafted if token_ids is None else token_ids[drafted]
    free = (kinds == 0) | (torch.rand(nodes, generator=g) < 0.1)
    tokens = torch.where(free, torch.randint(0, vocab, (nodes,), generator=g), drafted[dist_index.long()])
    if draw(st.sampled_from([False, False, True])):
        draft, token_ids, kinds = None, None, kinds * 0
    return {
        "tokens": tokens,
        "offsets": int32(offsets),
        "proposal_kinds": kinds,
        "dist_index": torch.where(kinds == 1, dist_index, -1).int(),
        "target": target,
        "draft": draft,
        "token_ids": token_ids,
    } | {
        "sampling": sampling,
        "mass": mass if draw(st.booleans()) else None,
        "rule": draw(st.sampled_from(["rejection", "block"])),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (len(counts),), generator=g),
        "root_positions": torch.randint(0, 2**31 - 1, (len(counts),), generator=g, dtype=torch.int32),
        "uniforms": torch.rand(nodes, generator=g) if draw(st.booleans()) else None,
        "gumbel_noise": None
        if draw(st.booleans())
        else tuple(
            gumbel(torch.randint(0, 2**32, (len(counts), size), generator=g)) for size in (-(-vocab // 1024), vocab)
        ),
    }


def fixed(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the thresholds."""
    return {
        name: case[name] for name in case if name not in ("seeds", "root_positions", "uniforms", "gumbel_noise", "mass")
    }


def compare_thresholds(case: dict[str, Any], got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Checks equality up to a few roundings; one float32 side rounds as float32."""
    (accept, residual), (true_accept, true_residual) = got, want
    dists = [part for part in (case["target"], case["draft"]) if part is not None]
    half = max(torch.finfo(part[1].dtype).eps for part in dists)
    if case["rule"] == "rejection":
        torch.testing.assert_close(accept, true_accept, rtol=8 * half, atol=half)
    else:  # h = S / (S + 1 - w): a rounding of S weighs more the smaller the denominator is
        steep = true_accept.double() / true_residual.sum(1, dtype=torch.float64).clamp(min=half)
        assert ((accept.double() - true_accept.double()).abs() <= 8 * half * (1 + steep)).all()
    torch.testing.assert_close(residual, true_residual, rtol=8 * half, atol=4 * half)


def check_logits(case: dict[str, Any], sampling: tuple[Tensor, ...], backends: Sequence[str]) -> None:
    """Checks that rejection_verify_logits equals rejection_verify on the distributions of distribution_stats. It
    returns them where a path ends by a rejection, and may return them if no token was rejected.
    """
    case = {name: case[name] for name in case if name not in ("uniforms", "gumbel_noise", "mass", "target")} | {
        "max_depth": 6,
        "logits": case["target"][0],
        "sampling": sampling,
    }
    results: list[tuple[Tensor, ...]] = []
    for backend in backends:
        with use_backend(backend):
            stats = distribution_stats(case["logits"], *sampling, masses=True)
            dists = {name: case[name] for name in case if name not in ("logits", "sampling")}
            want = rejection_verify(**dists, target=(case["logits"], *stats[:4]), mass=stats[4])
            path, accepted, token, *found = rejection_verify_logits(**case)
        assert all(torch.equal(a, b) for a, b in zip((path, accepted, token), want, strict=True))
        ends = path.gather(1, accepted[:, None].long()).squeeze(1)
        refused = ends[(ends >= 0) & (ends + 1 < case["offsets"][1:])]
        known = (found[1] != INF).nonzero().squeeze(1)
        assert set(refused.tolist()) <= set(known.tolist()) and found[4].isnan().all(1)[found[1] == INF].all()
        for a, b in zip(found, stats, strict=True):
            assert torch.equal(a[known].nan_to_num(nan=7.0), b[known].nan_to_num(nan=7.0))
        if case["rule"] == "rejection":
            assert set(known.tolist()) <= set(ends[ends >= 0].tolist()), "distributions of other rows"
        shared = refused if case["rule"] == "rejection" else known
        results.append((path, accepted, token, *(part[shared].nan_to_num(nan=7.0) for part in found)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

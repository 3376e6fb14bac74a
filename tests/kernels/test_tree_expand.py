"""tree_expand: children and their order on every backend, against definitions written with plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given as with_cases
from hypothesis import settings
from oracles.expand_cases import compare, expansions
from torch import Tensor

from specdec_kernels import OPS, distribution_stats, replay_sample, tree_expand, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.random import replay_noise

BACKENDS = [
    "reference",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
    ),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def dists(logits: Tensor, t: float = 1.0, k: int = 0, p: float = 1.0, m: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    stats = distribution_stats(
        logits,
        torch.full((rows,), t),
        torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), p),
        torch.full((rows,), m),
    )
    return stats[0], stats[2], stats[3]


def expand(logits: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = tree_expand(logits, **given)
    return found


def case(seed: int, nodes: int, vocab: int, dtype: torch.dtype, **dist: Any) -> dict[str, Any]:
    source = torch.Generator().manual_seed(seed)
    logits = (torch.randn(nodes, vocab, generator=source) * 2).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inv_t, cut, tie = dists(logits, **dist)
    middle = nodes // 2
    return {
        "logits": logits,
        "inv_t": inv_t,
        "cut": cut,
        "tie_id": tie,
        "offsets": torch.tensor([0, middle, middle, nodes], dtype=torch.int32),
        "scores": -torch.rand(nodes, generator=source).to(wide) * 3,
    }


def slow(given: dict[str, Any], width: int, keep: int) -> tuple[list[list[tuple[int, float]]], list[list[int]]]:
    """Returns children as (token, score) and the best of each tree, in float64 and with Python's sorting."""
    logits, level = given["logits"].double(), given["logits"].to(given["inv_t"].dtype)
    children = []
    for node in range(logits.shape[0]):
        cut, tie, inv_t = given["cut"][node], int(given["tie_id"][node]), given["inv_t"][node]
        noise = torch.zeros(logits.shape[1])
        if "seeds" in given and int(given["positions"][node]) >= 0:
            noise = replay_noise(given["seeds"][node : node + 1], given["positions"][node : node + 1], len(noise))[0]
        kept = [v for v in range(logits.shape[1]) if level[node, v] > cut or (level[node, v] == cut and v <= tie)]
        order = level[node] * inv_t + (noise if noise.any() else 0)  # rounded as the operator rounds
        exact = logits[node] * inv_t.double() + noise.double()
        sharp = given.get("sharpness", 1.0)
        norm = math.log(sum(math.exp(sharp * exact[v]) for v in kept)) if kept else 0.0
        best = sorted(kept, key=lambda v: (-float(order[v]), v))[:width]
        children.append([(v, float(given["scores"][node]) + sharp * float(exact[v]) - norm) for v in best])
    bounds, kept_per_tree = given["offsets"].tolist(), []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        flat = [(-children[n][j][1], n * width + j) for n in range(start, stop) for j in range(len(children[n]))]
        kept_per_tree.append([at for _, at in sorted(flat)[:keep]])
    return children, kept_per_tree


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dist", [{}, {"t": 0.6}, {"k": 5}, {"p": 0.7, "t": 1.4}, {"m": 0.2}], ids=str)
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noise"])
def test_children_are_those_of_the_definition(backend: str, dtype: torch.dtype, dist: dict, noisy: bool) -> None:
    for seed, (nodes, vocab, width, keep) in enumerate(
        [(5, 7, 3, 4), (3, 130, 8, 30), (1, 1, 1, 2), (4, 129, 2, 3), (3, 90, 40, 50)]
    ):
        given = case(seed, nodes, vocab, dtype, **dist)
        if seed % 2:
            given["sharpness"] = 1.7
        if noisy:
            given["seeds"] = torch.arange(nodes) * 977 - 3
            given["positions"] = torch.tensor([-1, 5, 5, 0, 60][:nodes], dtype=torch.int32)
        with use_backend(backend):
            tokens, scores, best = expand(**given, width=width, keep=keep)
        children, kept = slow(given, width, keep)
        assert tokens.shape == scores.shape == (nodes, width) and best.shape == (3, keep)
        for node, own in enumerate(children):
            assert tokens[node].tolist() == [v for v, _ in own] + [-1] * (width - len(own))
            want = torch.tensor([score for _, score in own], dtype=torch.float64)
            assert torch.allclose(scores[node, : len(own)].double(), want, atol=2e-5, rtol=1e-5)
            assert (scores[node, len(own) :] == -torch.inf).all()
        for tree, order in enumerate(kept):
            assert best[tree].tolist() == order + [-1] * (keep - len(order))


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
@settings(max_examples=200, deadline=None, derandomize=True)
@with_cases(expansions())
def test_the_extension_equals_the_reference(case: dict[str, Any]) -> None:
    with use_backend("reference"):
        want = expand(**case)
    compare(want, want, case)
    with use_backend("cpu"):
        compare(expand(**case), want, case)


@every_backend
def test_with_noise_the_first_child_is_the_replayed_token(backend: str) -> None:
    given = case(9, 40, 3000, torch.float32, t=0.8, p=0.95)
    seeds, positions = torch.arange(40) * 31, torch.arange(40, dtype=torch.int32)
    with use_backend(backend):
        tokens, _, _ = expand(**given, width=4, keep=1, seeds=seeds, positions=positions)
        wanted = replay_sample(given["logits"], given["inv_t"], given["cut"], given["tie_id"], seeds, positions)
    assert tokens[:, 0].tolist() == wanted.tolist()


@every_backend
def test_noise_depends_on_a_node_s_seed_and_position_alone(backend: str) -> None:
    """Nodes of one depth share their noise; nodes that differ in the seed or the position do not."""
    given = case(5, 7, 300, torch.float32)
    seeds = torch.tensor([3, 3, 3, 4, 4, 4, 3])
    positions = torch.tensor([6, 6, 7, 7, -1, 7, 6], dtype=torch.int32)
    with use_backend(backend):
        found = expand(**given, width=5, keep=9, seeds=seeds, positions=positions)[0]
    children, _ = slow(given | {"seeds": seeds, "positions": positions}, 5, 9)
    assert found.tolist() == [[token for token, _ in own] for own in children]


@every_backend
def test_ties_go_to_the_lower_id_and_the_earlier_child(backend: str) -> None:
    logits = torch.zeros(2, 300)
    logits[:, 250:] = 1.0
    inv_t, cut, tie = dists(logits)
    given = {"logits": logits, "inv_t": inv_t, "cut": cut, "tie_id": tie, "scores": torch.zeros(2)}
    with use_backend(backend):
        tokens, _, best = expand(**given, offsets=torch.tensor([0, 2], dtype=torch.int32), width=3, keep=4)
    assert tokens.tolist() == [[250, 251, 252]] * 2 and best.tolist() == [[0, 1, 2, 3]]


@every_backend
def test_greedy_broken_and_dead_nodes(backend: str) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    logits[1, 3], logits[2, 4] = float("nan"), float("inf")
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    zero, one = torch.zeros(5), torch.ones(5)
    stats = distribution_stats(logits, temperature, zero.int(), one, zero)
    given = {"logits": logits, "inv_t": stats[0], "cut": stats[2], "tie_id": stats[3]}
    given["scores"] = torch.tensor([-1.5, 0.0, 0.0, -torch.inf, 0.0])
    with use_backend(backend):
        tokens, scores, best = expand(**given, offsets=torch.tensor([0, 4, 5], dtype=torch.int32), width=2, keep=3)
    assert tokens[0].tolist() == [int(logits[0].argmax()), -1] and scores[0].tolist() == [-1.5, -torch.inf]
    assert (tokens[1:4] == -1).all() and (scores[1:4] == -torch.inf).all()
    assert best.tolist() == [[0, -1, -1], [8, 9, -1]] and scores[4, 0] > scores[4, 1] > -torch.inf


@every_backend
def test_no_nodes_and_strided_logits(backend: str) -> None:
    empty = case(0, 0, 5, torch.float32)
    with use_backend(backend):
        tokens, scores, best = expand(**empty, width=2, keep=2)
        assert tokens.shape == scores.shape == (0, 2) and best.tolist() == [[-1, -1]] * 3
        given = case(3, 4, 64, torch.float32)
        padded = torch.full((4, 100), 50.0)
        padded[:, :64] = given["logits"]
        for one, other in zip(
            expand(**given, width=3, keep=5),
            expand(**(given | {"logits": padded[:, :64]}), width=3, keep=5),
            strict=True,
        ):
            assert torch.equal(one, other)


@every_backend
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width is 0; expected between 1 and the vocabulary of 7"),
        ({"width": 8}, "width is 8"),
        ({"sharpness": 0.0}, "sharpness is 0.0; expected a number above 0"),
        ({"keep": 0}, "keep is 0; expected at least 1"),
        ({"scores": torch.zeros(4)}, r"scores has shape \[4\]; expected \[5\]"),
        ({"scores": torch.zeros(5, dtype=torch.float64)}, "scores has dtype"),
        ({"offsets": torch.tensor([0, 9], dtype=torch.int32)}, r"offsets\[1\] is 9"),
        ({"seeds": torch.zeros(5, dtype=torch.int64)}, "got one of seeds and positions; expected both, or neither"),
        ({"tie_id": torch.zeros(5, dtype=torch.int64)}, "tie_id has dtype"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments_are_named(backend: str, change: dict[str, Any], message: str) -> None:
    given = {**case(0, 5, 7, torch.float32), "width": 2, "keep": 2, **change}
    with use_backend(backend), pytest.raises(ValueError, match=f"tree_expand: {message}"):
        expand(**given)


def test_the_kernel_serves_by_default() -> None:
    if extension.unavailable_reason() is None:
        given = case(0, 5, 7, torch.float32)
        assert OPS["tree_expand"].choose_backend(given.pop("logits"), **given, width=2, keep=2) == "cpu"

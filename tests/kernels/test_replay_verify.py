"""replay_verify: extension against reference on ragged trees; equal to its three parts; reads the path only; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles.replay_cases import INF, walks

from specdec_kernels import distribution_stats, exact_match_verify, replay_sample, replay_verify, tree_plan, use_backend
from specdec_kernels.dispatch import extension

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(walks())
def test_it_is_its_three_parts(case: dict[str, Any]) -> None:
    for backend in BACKENDS:
        with use_backend(backend):
            stats = distribution_stats(case["logits"], *case["sampling"], masses=True)
            path, accepted, token, *found = replay_verify(**case)
            row = torch.repeat_interleave(
                torch.arange(len(case["seeds"])), case["offsets"].diff().long(), output_size=int(case["offsets"][-1])
            )
            row = torch.cat([row, row.new_zeros(len(case["tokens"]) - len(row))])
            if len(case["seeds"]):
                parents = torch.full((len(case["tokens"]),), -1)
                for node in range(len(parents)):
                    child = int(case["first_child"][node])
                    while child >= 0:
                        parents[child], child = node, int(case["next_sibling"][child])
                depth = torch.zeros(len(parents), dtype=torch.int32)
                for node, parent in enumerate(parents.tolist()):
                    depth[node] = depth[parent] + 1 if parent >= 0 else 0
                at = (case["seeds"][row], case["root_positions"][row] + depth + 1)
                choice = replay_sample(case["logits"], stats[0], stats[2], stats[3], *at)
            else:
                choice = torch.zeros_like(case["tokens"])
            links = (case["tokens"], case["offsets"], case["first_child"], case["next_sibling"])
            want = exact_match_verify(*links, choice, case["score_only"], max_depth=8)
        for a, b in zip((path, accepted, token), want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        seen, known = path[path >= 0].long(), (found[1] != INF).nonzero().squeeze(1)
        assert sorted(seen.tolist()) == known.tolist(), "a row beside the paths was read"
        assert found[4].isnan().all(1)[found[1] == INF].all()
        for a, b in zip(found, stats, strict=True):
            assert a.dtype == b.dtype and torch.equal(a[known].nan_to_num(nan=7.0), b[known].nan_to_num(nan=7.0))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rows", [1, 5])
def test_threads_do_not_change_the_result(rows: int) -> None:
    torch.manual_seed(0)
    nodes, vocab = rows * 3, 140_000
    logits = torch.randn(nodes, vocab) * 2
    sampling = (torch.ones(nodes), torch.zeros(nodes, dtype=torch.int32), torch.ones(nodes), torch.zeros(nodes))
    offsets = torch.arange(0, nodes + 1, 3, dtype=torch.int32)
    plan = tree_plan(torch.tensor([-1, 0, 0] * rows, dtype=torch.int32), offsets)
    seeds, roots = torch.arange(rows), torch.arange(rows, dtype=torch.int32)
    tokens, before, found = torch.zeros(nodes, dtype=torch.int64), torch.get_num_threads(), []
    inv_t, _, cut, tie_id = distribution_stats(logits, *sampling)
    tokens[2::3] = replay_sample(*(part[::3].contiguous() for part in (logits, inv_t, cut, tie_id)), seeds, roots + 1)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        links = (tokens, offsets, plan.first_child, plan.next_sibling, None)
        with use_backend("cpu"):
            found.append(replay_verify(*links, logits, sampling, seeds, roots, max_depth=1))
    torch.set_num_threads(before)
    assert found[0][1].tolist() == [1] * rows
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("end", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_threads_give_a_chain_the_bits_of_one(temperature: float, end: int) -> None:
    """A chain of four nodes that ends at its root, after it, at a score-only node, or at its leaf. Only rows on the
    path are read.
    """
    torch.manual_seed(end)
    nodes, vocab = 4, 70_000
    logits = torch.randn(nodes, vocab) * 2
    none = torch.zeros(nodes)
    sampling = (torch.full((nodes,), temperature), none.int(), none + 1, none)
    links = tree_plan(torch.arange(-1, nodes - 1, dtype=torch.int32), torch.tensor([0, nodes], dtype=torch.int32))
    seeds, root = torch.tensor([7]), torch.tensor([3], dtype=torch.int32)
    inv_t, _, cut, tie_id = distribution_stats(logits, *sampling)
    own = replay_sample(logits, inv_t, cut, tie_id, seeds.expand(nodes), root + 1 + torch.arange(nodes).int())
    tokens, score_only = torch.cat([own[:1], own[:-1]]), torch.zeros(nodes, dtype=torch.bool)
    if end < nodes - 1:
        tokens[end + 1] += 1
    elif end == nodes:
        score_only[2] = True
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        where = tokens, torch.tensor([0, nodes], dtype=torch.int32), links.first_child, links.next_sibling, score_only
        with use_backend("cpu"):
            found.append(replay_verify(*where, logits, sampling, seeds, root, max_depth=nodes - 1))
    torch.set_num_threads(before)
    assert found[0][1].tolist() == [1 if end == nodes else end]
    assert (found[0][4] == INF).tolist() == [at > int(found[0][1]) for at in range(nodes)]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_depth": 0}, "longer than max_depth = 0"),
        ({"max_depth": -1}, "max_depth"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, "seeds"),
        ({"root_positions": torch.zeros(1)}, "root_positions"),
        ({"logits": torch.zeros(3, 5)}, "expected"),
        ({"first_child": torch.tensor([0, -1], dtype=torch.int32)}, "first_child|do not point forward"),
        ({"score_only": torch.zeros(2)}, "score_only"),
        ({"sampling": (torch.tensor([-1.0, 1.0]), *(torch.zeros(2),) * 3)}, "expected"),
    ],
    ids=str,
)
def test_bad_arguments(backend: str, change: dict[str, Any], message: str) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = 9.0
    good: dict[str, Any] = {
        "tokens": torch.tensor([0, 3]),
        "offsets": torch.tensor([0, 2], dtype=torch.int32),
        "first_child": torch.tensor([1, -1], dtype=torch.int32),
        "next_sibling": torch.tensor([-1, -1], dtype=torch.int32),
        "score_only": None,
        "logits": logits,
        "sampling": (torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2)),
        "seeds": torch.tensor([1]),
        "root_positions": torch.tensor([4], dtype=torch.int32),
        "max_depth": 1,
    }
    with use_backend(backend):
        assert replay_verify(**good)[1].tolist() == [1]
        strided = {name: good[name].repeat_interleave(2)[::2] for name in ("tokens", "first_child", "seeds")}
        assert replay_verify(**good | strided)[1].tolist() == [1]
        with pytest.raises(ValueError, match=message):
            replay_verify(**good | change)

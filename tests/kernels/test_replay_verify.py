"""replay_verify: extension against reference on ragged trees; equal to its three parts; reads the path only; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import extension, law_stats, replay_sample, replay_verify, tree_plan, tree_verify, use_backend

BACKENDS = ["reference"] + ([] if extension.missing() else ["cpu"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


@st.composite
def walks(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged trees whose tokens are often the target's own, four dtypes, filters, greedy and broken rows, scouts."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9]), max_size=4))
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    tail = draw(st.integers(0, 2))
    parents = [int(torch.randint(-1 if i == 0 else 0, max(i, 1), (1,), generator=g)) if i else -1
               for count in counts for i in range(count)]  # fmt: skip
    plan = tree_plan(torch.tensor(parents + [-1] * tail, dtype=torch.int32), offsets)
    nodes, vocab = len(parents) + tail, draw(st.sampled_from([2, 3, 33, 1024, 1025, 3000]))

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (nodes,), generator=g)]

    level = torch.randn(nodes, vocab + 2, generator=g) * draw(st.sampled_from([0.0, 1.0, 5.0]))
    if draw(st.booleans()):
        level[torch.rand(level.shape, generator=g) < 0.5] = -INF
    if nodes and draw(st.sampled_from([False, False, True])):
        level[int(torch.randint(0, nodes, (1,), generator=g))] = float("nan")
    logits = level.to(draw(st.sampled_from(DTYPES)))[:, :vocab]
    filters = (pick(0, 0, 5).int(), pick(1, 1, 0.8), pick(0, 0, 0.1)) if draw(st.booleans()) else None
    sampling = (pick(0, 0.5, 1, 1), *(filters or (pick(0).int(), pick(1.0), pick(0.0))))
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(counts),), generator=g)
    roots = torch.randint(0, 2**31 - 20, (len(counts),), generator=g, dtype=torch.int32)
    tokens = torch.randint(0, vocab, (nodes,), generator=g)
    if len(parents):  # the choice after its parent is a node's token three times out of four
        inv_t, _, cut, tie_id = law_stats(logits, *sampling)
        row = plan.row.long().clamp(min=0)
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds[row], roots[row] + plan.depth + 1)
        packed = torch.tensor(parents + [0] * tail) + offsets[:-1].long()[row]
        told = torch.rand(nodes, generator=g) < 0.75
        tokens = torch.where(told, choice[packed.clamp(min=0)], tokens)
    return {
        "tokens": tokens,
        "offsets": offsets,
        "first_child": plan.first_child,
        "next_sibling": plan.next_sibling,
        "scouts": torch.rand(nodes, generator=g) < 0.2 if draw(st.booleans()) else None,
        "logits": logits,
        "sampling": sampling,
        "seeds": seeds,
        "root_positions": roots,
        "max_depth": 8,
    }


@settings(max_examples=120, deadline=None, derandomize=True)
@given(walks())
def test_it_is_its_three_parts(case: dict[str, Any]) -> None:
    for backend in BACKENDS:
        with use_backend(backend):
            stats = law_stats(case["logits"], *case["sampling"], masses=True)
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
            want = tree_verify(*links, choice, case["scouts"], max_depth=8)
        for a, b in zip((path, accepted, token), want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        seen, known = path[path >= 0].long(), (found[1] != INF).nonzero().squeeze(1)
        assert sorted(seen.tolist()) == known.tolist(), "a row beside the paths was read"
        assert found[4].isnan().all(1)[found[1] == INF].all()
        for a, b in zip(found, stats, strict=True):
            assert a.dtype == b.dtype and torch.equal(a[known].nan_to_num(nan=7.0), b[known].nan_to_num(nan=7.0))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rows", [1, 5])
def test_threads_do_not_change_the_answer(rows: int) -> None:
    torch.manual_seed(0)
    nodes, vocab = rows * 3, 140_000
    logits = torch.randn(nodes, vocab) * 2
    sampling = (torch.ones(nodes), torch.zeros(nodes, dtype=torch.int32), torch.ones(nodes), torch.zeros(nodes))
    offsets = torch.arange(0, nodes + 1, 3, dtype=torch.int32)
    plan = tree_plan(torch.tensor([-1, 0, 0] * rows, dtype=torch.int32), offsets)
    seeds, roots = torch.arange(rows), torch.arange(rows, dtype=torch.int32)
    tokens, before, found = torch.zeros(nodes, dtype=torch.int64), torch.get_num_threads(), []
    inv_t, _, cut, tie_id = law_stats(logits, *sampling)
    tokens[2::3] = replay_sample(*(part[::3].contiguous() for part in (logits, inv_t, cut, tie_id)), seeds, roots + 1)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        links = (tokens, offsets, plan.first_child, plan.next_sibling, None)
        with use_backend("cpu"):
            found.append(replay_verify(*links, logits, sampling, seeds, roots, max_depth=1))
    torch.set_num_threads(before)
    assert found[0][1].tolist() == [1] * rows
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))


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
        ({"scouts": torch.zeros(2)}, "scouts"),
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
        "scouts": None,
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

"""Static trees are drawn on the device: a step of theirs takes data to the host once, when all levels are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.capture_guard import host_reads
from torch import Tensor

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.drafters import make_drafter

MASK = torch.tensor([True, False, True])
READS: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: bool(x[0] > 0),
    lambda x: int(x[0]),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x[MASK],
    lambda x: torch.equal(x, x),
]


@pytest.mark.parametrize("deed", READS)
def test_every_read_is_counted_once(deed: Callable[[Tensor], Any]) -> None:
    with host_reads() as reads:
        deed(torch.ones(3))
        torch.ones(3).clamp(max=0.5)[[0, 1]].cumsum(0)
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("eagle", "without_replacement"),
        ("eagle", "hybrid"),
        ("eagle3", "without_replacement"),
        ("mtp", "iid"),
        ("draft_tree", "hybrid"),
        ("draft_tree", "coupled"),
    ],
)
def test_a_proposal_of_any_depth_is_read_once(name: str, how: str, tmp_path: Path) -> None:
    """For rows that are greedy, whose laws run out of tokens, that have penalties and whose texts end, side by side."""
    target = models.target("llama", max_rows=4, max_length=64)
    if name == "draft_tree":
        small = HuggingFaceTarget(models.kin("llama"), max_rows=4, max_length=64)
        made: Any = get_drafter(name)(small, widths=(3, 2, 1), how=how)
    else:
        options = {"depth": 0, "how": how, **heads.options(name, tmp_path)}
        made = make_drafter(name, options, target=target)
    propose, counts, nodes, deepest = made.propose, [], set(), 0

    def watched(*args: Any) -> Any:
        nonlocal deepest
        with host_reads() as reads:
            draft = propose(*args)
        counts.append(len(reads))
        nodes.update(draft.counts)
        deepest = max(deepest, draft.max_depth)
        return draft

    made.propose = watched
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"temperature": 0.7}]
    if name != "eagle3":  # there a reduced vocabulary is drawn from as it is
        asked[2] |= {"repetition_penalty": 1.3, "min_new_tokens": 4}
    params = [SamplingParams(seed=at, max_new_tokens=28 + at, **own) for at, own in enumerate(asked)]
    engine = Engine(target, made, rule="replay" if how == "coupled" else "tree")
    handles = engine.generate([models.prompt(length) for length in (2, 5, 17)], params)
    assert [len(handle.tokens) for handle in handles] == [28, 29, 30] and engine.stats.faults == 0
    assert deepest >= 3 and len(nodes) > 2 and engine.stats.drafted > 30
    assert max(counts) == 1

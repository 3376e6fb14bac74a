"""Trees grow on the device: a proposal reads data to the host once, after all levels; observing reads none."""

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
from specdec_fast.draft_runners import parallel_heads
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.trees import expansion

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
    ("name", "how", "depth"),
    [
        ("eagle", "without_replacement", 0),
        ("eagle", "hybrid", 0),
        ("eagle3", "without_replacement", 0),
        ("mtp", "iid", 0),
        ("draft_tree", "hybrid", 0),
        ("draft_tree", "coupled", 0),
        ("eagle", "coupled", 4),
        ("eagle3", "top_k", 4),
        ("draft_tree", "coupled", 4),
        ("medusa", None, 0),
    ],
)
def test_a_proposal_of_any_depth_is_read_once(
    name: str, how: str | None, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has greedy rows, distributions with few tokens, penalties and texts that end.

    Passes have the sizes of a GPU: on a CPU, passes over dynamic trees are as large, with the same drafts.
    """
    drafts = []
    for freely in (False, True) if depth else (False,):
        for module in (expansion, parallel_heads):
            monkeypatch.setattr(module, "host_reads_are_free", lambda device, freely=freely: freely)
        drafts.append(run(name, how, depth, tmp_path / str(freely), freely))
    assert drafts[0] == drafts[-1]


def run(name: str, how: str | None, depth: int, tmp_path: Path, freely: bool) -> list[list[Any]]:
    """Returns all drafts of three texts."""
    target = models.target("llama", max_rows=4, max_length=64)
    if name == "draft_tree":
        small = HuggingFaceTarget(models.kin("llama"), max_rows=4, max_length=64)
        made: Any = get_drafter(name)(small, widths=(3, 2, 1), how=how, depth=depth, width=4)
    elif name == "medusa":
        made = get_drafter(name)(target, MedusaHeads(heads.HIDDEN, heads.VOCAB, 3), shape=(-1, 0, 0, 1, 3))
    else:
        own = {"depth": depth, "how": how}
        made = make_drafter(name, {**own, **heads.options(name, tmp_path)}, target=target)
    propose, observe, counts, observe_reads, nodes, deepest = made.propose, made.observe, [], [], set(), 0
    drafts = []

    def watched(*args: Any) -> Any:
        nonlocal deepest
        with host_reads() as reads:
            draft = propose(*args)
        counts.append(len(reads))
        nodes.update(draft.counts)
        drafts.append([draft.rows.tolist(), draft.tokens.tolist(), draft.parents.tolist(), draft.counts])
        deepest = max(deepest, draft.max_depth)
        return draft

    def listened(*args: Any) -> None:
        with host_reads() as reads:
            observe(*args)
        observe_reads.extend(reads)

    made.propose, made.observe = watched, listened
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"temperature": 0.7}]
    if name != "eagle3" or depth:  # otherwise tokens are sampled from the reduced vocabulary itself
        asked[2] |= {"repetition_penalty": 1.3, "min_new_tokens": 4}
    params = [SamplingParams(seed=at, max_new_tokens=28 + at, **own) for at, own in enumerate(asked)]
    engine = Engine(target, made, rule="recursive_rejection" if made.needs.dists else "replay")
    handles = engine.generate([models.prompt(length) for length in (2, 5, 17)], params)
    assert [len(handle.tokens) for handle in handles] == [28, 29, 30] and engine.stats.faults == 0
    assert deepest >= 3 and len(nodes) > 2 and engine.stats.num_draft_tokens > 30
    if name == "medusa":  # it reads once whether the logits of new rows are finite
        assert counts[0] == 1 and not any(counts[1:])
    else:
        assert freely or max(counts) == 1
    assert not observe_reads
    return drafts

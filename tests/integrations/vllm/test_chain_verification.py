"""Layouts of vLLM's chains, and verification on them, against the project's rules on the same drafts."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.integrations.vllm.chain_verification import (
    Chains,
    empty_row,
    step_layout,
    verify_chains,
    with_empty_row,
)
from specdec_kernels import distribution_stats, rejection_verify_logits

CPU = torch.device("cpu")


def test_layouts_of_the_longest_chains_are_made_too() -> None:
    layout = step_layout((129, 129), CPU)
    assert layout.max_depth == 128 and layout.plan.first_child[127] == 128 and layout.plan.first_child[128] == -1
    assert step_layout((3, 2), CPU) is step_layout((3, 2), CPU)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("sampled", [False, True])
def test_verification_is_that_of_the_operator(rule: str, sampled: bool, generator: torch.Generator) -> None:
    counts, vocab = (4, 2, 1, 3), 30
    layout = step_layout(counts, CPU)
    nodes = sum(counts)
    logits = torch.randn(nodes, vocab, generator=generator)
    tokens = torch.randint(vocab, (nodes,), generator=generator)
    one = torch.ones(nodes)
    sampling = (one * 0.8, one.int() * 0, one, one * 0)
    keys = (torch.arange(4), torch.arange(4, dtype=torch.int32) + 5)
    chains, dists = Chains(tokens, layout), None
    index, kinds = one.int() * 0 - 1, (one * 0).to(torch.int8)
    if sampled:
        rows = torch.randn(nodes, vocab, generator=generator)
        dists = (rows, *distribution_stats(rows, *sampling))
        index, kinds = torch.arange(nodes, dtype=torch.int32), one.to(torch.int8)
        chains.sampled, chains.dist_index = with_empty_row(dists), index
    emitted, accepted = verify_chains(rule, chains, logits, sampling, *keys)
    path, expected, following, *_ = rejection_verify_logits(
        tokens, layout.offsets, kinds, index, logits, sampling, dists, None, *keys, max_depth=3, rule=rule
    )
    assert torch.equal(accepted, expected)
    for row, count in enumerate(expected.tolist()):
        found = [int(tokens[node]) for node in path[row, 1 : count + 1]]
        assert emitted[row].tolist() == [*found, int(following[row]), *[-1] * (3 - count)]


def test_the_empty_row_has_no_weight() -> None:
    logits, inv_t, lse, cut, tie_id = empty_row(5, torch.float32, CPU, 0)
    keep = (logits > cut[:, None]) | ((logits == cut[:, None]) & (torch.arange(5) <= tie_id[:, None]))
    assert not keep.any() and torch.isfinite(inv_t).all() and torch.isfinite(lse).all()

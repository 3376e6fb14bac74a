"""Verifies vLLM's packed chains with the project's operators.

vLLM lays out the logits of a step as rows of nodes: for each request its root, then its draft tokens. Row i is the
distribution of the token after node i. This is the layout of the operators, so no logits are moved.
Tests: tests/integrations/vllm/test_chain_verification.py, tests/integrations/vllm/test_lane_distributions.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.device_transfer import current_stream_id
from specdec_fast.core.emitted_tokens import tokens_after_path
from specdec_kernels import TreePlan, rejection_verify_logits, replay_verify, tree_plan

Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Sampling = tuple[Tensor, Tensor, Tensor, Tensor]


class StepLayout:
    """All of a step's tensors that follow from the lengths of its chains.

    Args:
        offsets: First node of each request, int32 [B + 1].
        plan: Links of the M nodes.
        num_nodes: M.
        max_depth: D, the most draft tokens of a request.

    Attributes:
        first: First node of each request, int64 [B].
        row_of: Request of each node, int64 [M], or None if it was not given.
    """

    __slots__ = ("deterministic", "first", "max_depth", "offsets", "plan", "row_of", "sampled")

    def __init__(
        self, offsets: Tensor, plan: TreePlan, num_nodes: int, max_depth: int, row_of: Tensor | None = None
    ) -> None:
        self.offsets, self.plan, self.max_depth, self.row_of = offsets, plan, max_depth, row_of
        device = offsets.device
        self.first = offsets[:-1].long()
        self.deterministic = torch.zeros(num_nodes, dtype=torch.int32, device=device)
        """Index of the only distribution that deterministic chains need, int32 [M]."""
        self.sampled = torch.ones(num_nodes, dtype=torch.int8, device=device)
        """Proposal kinds of sampled chains, int8 [M]."""


def step_layout(counts: tuple[int, ...], device: torch.device) -> StepLayout:
    """Returns the layout of chains. Those that vLLM repeats are remembered, so they are only read.

    Args:
        counts: Nodes of each request, root included.
        device: Device of the tensors.

    Returns:
        The layout.
    """
    return _remembered(counts, device, current_stream_id(device))


@lru_cache(maxsize=512)
def _remembered(counts: tuple[int, ...], device: torch.device, stream: int) -> StepLayout:
    """A layout of one stream: others would not wait for the copies that fill it."""
    layout: ChainLayout = chain_layout(tuple(range(len(counts))), counts, device)
    with torch.inference_mode(False):
        plan = layout.plan or tree_plan(layout.parents, layout.offsets)
        return StepLayout(layout.offsets, plan, sum(counts), max(counts) - 1, layout.row_of)


@dataclass(slots=True)
class Chains:
    """The drafts of B requests, packed as M nodes.

    Attributes:
        tokens: Root and draft tokens, int64 [M]. The ids of roots do not count. A negative id ends its chain.
        layout: What follows from the lengths of the chains.
        sampled: Distributions of sampled draft tokens, R rows, or None if all tokens are deterministic. The last row is
            one without any weight (`empty_row`).
        dist_index: Row of `sampled` from which each node was sampled, int32 [M]. A token that was not sampled has the
            last row and is no proposal. None if all tokens are deterministic.
    """

    tokens: Tensor
    layout: StepLayout
    sampled: Distribution | None = None
    dist_index: Tensor | None = None


def verify_chains(
    rule: str, chains: Chains, logits: Tensor, sampling: Sampling, seeds: Tensor, roots: Tensor
) -> tuple[Tensor, Tensor]:
    """Verifies the drafts of a step and samples the token after them.

    Args:
        rule: "replay", "rejection" or "block".
        chains: The drafts.
        logits: [M, V], any float dtype.
        sampling: (temperature, top_k, top_p, min_p) of each node, as `distribution_stats` takes them, [M].
        seeds: Seed of each request, int64 [B].
        roots: Absolute position of each root, int32 [B].

    Returns:
        Emitted tokens of each request, -1 padded, int32 [B, max_depth + 1], and the number of accepted draft tokens,
        int32 [B].
    """
    tokens, layout, depth = chains.tokens, chains.layout, chains.layout.max_depth
    if rule == "replay":
        links = (tokens, layout.offsets, layout.plan.first_child, layout.plan.next_sibling, None)
        found = replay_verify(*links, logits, sampling, seeds, roots, max_depth=depth)
    elif chains.sampled is None or chains.dist_index is None:
        # A token that is no proposal gets a distribution in which it has no weight. Such a token is rejected, and the
        # node before it counts as the last one of its chain. So no token is read on the host.
        none = tokens < 0
        found = rejection_verify_logits(
            tokens.masked_fill(none, 1), layout.offsets, none.to(torch.int8), layout.deterministic, logits, sampling,
            *_only_id_0(logits.device, current_stream_id(logits.device)), seeds, roots, max_depth=depth, rule=rule,
        )  # fmt: skip
    else:
        found = rejection_verify_logits(
            tokens.clamp(min=0), layout.offsets, layout.sampled, chains.dist_index, logits, sampling, chains.sampled,
            None, seeds, roots, max_depth=depth, rule=rule,
        )  # fmt: skip
    return tokens_after_path(tokens, *found[:3]), found[1]


@lru_cache(maxsize=64)
def _only_id_0(device: torch.device, stream: int) -> tuple[Distribution, Tensor]:
    """A distribution over one column, and the id of this column."""
    with torch.inference_mode(False):
        one = torch.ones(1, device=device)
        return (one.view(1, 1), one, one, one - torch.inf, one.to(torch.int32)), one.long() - 1


@lru_cache(maxsize=64)
def empty_row(columns: int, dtype: torch.dtype, device: torch.device, stream: int) -> Distribution:
    """Returns one distribution without any weight. It is only read.

    Args:
        columns: Its width.
        dtype: Type of its logits.
        device: Its device.
        stream: Identity of the current stream.

    Returns:
        Logits [1, columns] and their statistics.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False):
        one = torch.ones(1, dtype=wide, device=device)
        none = torch.full((1,), -1, dtype=torch.int32, device=device)
        return torch.zeros(1, columns, dtype=dtype, device=device), one, one - 1, one + torch.inf, none


def with_empty_row(dists: Distribution) -> Distribution:
    """Adds a distribution without any weight."""
    logits = dists[0]
    last = empty_row(logits.shape[1], logits.dtype, logits.device, current_stream_id(logits.device))
    parts = [torch.cat(each) for each in zip(dists, last)]
    return parts[0], parts[1], parts[2], parts[3], parts[4]

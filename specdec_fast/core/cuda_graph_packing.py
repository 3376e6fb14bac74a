"""Packed drafts whose shape the device decides: the request of each of a fixed number of nodes.

CUDA-graph steps use it, since no shape of theirs may depend on data. Tests:
tests/engine/cuda_graph/test_step_program.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.draft import Draft
from specdec_kernels import TreePlan


@dataclass(frozen=True, slots=True)
class Packing:
    """The assignment of M packed nodes to B requests. Nodes behind `offsets[B]` belong to no request.

    Attributes:
        offsets: First node of each request, int32 [B + 1].
        row_of: Request of each node, int64 [M]; arbitrary for nodes without a request.
        place: Index of each node in its tree, int32 [M]; arbitrary for nodes without a request.
        inside: Whether a node belongs to a request, bool [M].
    """

    offsets: Tensor
    row_of: Tensor
    place: Tensor
    inside: Tensor

    @property
    def last(self) -> Tensor:
        """Last node of each request, int64 [B]; arbitrary for requests without nodes."""
        return (self.offsets[1:] - 1).clamp(min=0).long()

    def nodes_by_row(self, first: int, stop: int) -> Tensor:
        """Returns the packed indices of nodes `first` to `stop - 1` of each request.

        Args:
            first: Index in the tree of the first node.
            stop: Index in the tree behind the last node.

        Returns:
            int64 [B, stop - first]; arbitrary where a request has fewer nodes.
        """
        numbers = torch.arange(first, stop, dtype=torch.int32, device=self.offsets.device)
        return (self.offsets[:-1, None] + numbers).clamp(max=self.place.shape[0] - 1).long()


def pack_nodes(counts: Tensor, max_nodes: int) -> Packing:
    """Assigns packed nodes to requests, without a device read.

    Args:
        counts: Nodes of each request, at most `max_nodes`, int32 [B].
        max_nodes: Capacity per request, which fixes M = B * max_nodes.

    Returns:
        The assignment of M nodes.
    """
    rows = counts.shape[0]
    offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    node = torch.arange(rows * max_nodes, dtype=torch.int32, device=counts.device)
    row_of = torch.searchsorted(offsets[1:], node, right=True).clamp(max=rows - 1)
    return Packing(offsets, row_of, node - offsets[row_of], node < offsets[-1:])


def build_packed_draft(
    rows: Tensor,
    packing: Packing,
    tokens: Tensor,
    parents: Tensor,
    *,
    depth: int,
    is_chain: bool = False,
    plan: TreePlan | None = None,
) -> Draft:
    """Builds a draft of deterministic trees from packed nodes.

    The host values of the draft, `counts` and `max_depth`, are capacities.

    Args:
        rows: Row of each request, int32 [B].
        packing: The assignment of the M nodes.
        tokens: Token of each node, int64 [M].
        parents: Parent of each node by its index in its tree, int32 [M].
        depth: Upper bound of the depth of any node.
        is_chain: Every node follows the one before it.
        plan: Depths, ancestors and links of the nodes if they are known.

    Returns:
        The draft. Nodes without a request have token 0 and parent -1.
    """
    minus_one = torch.full_like(packing.place, -1)
    return Draft(
        rows=rows,
        tokens=torch.where(packing.inside, tokens, 0),
        parents=torch.where(packing.inside, parents, minus_one),
        offsets=packing.offsets,
        proposal_kinds=torch.zeros_like(packing.place, dtype=torch.int8),
        dist_index=minus_one,
        row_of=packing.row_of,
        counts=(tokens.shape[0] // rows.shape[0],) * rows.shape[0],
        max_depth=depth,
        is_chain=is_chain,
        plan=plan,
    )

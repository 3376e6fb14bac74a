"""Packed batches whose shape the device decides: where each of a fixed number of nodes belongs.

Tests: tests/engine/cuda_graph/test_step_program.py.
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
    """Of M nodes: offsets int32 [B + 1]; row_of int64 [M] and place int32 [M], a node's row and its index there; inside
    bool [M], false for the nodes behind offsets[B], which belong to nobody (their row and place are any).
    """

    offsets: Tensor
    row_of: Tensor
    place: Tensor
    inside: Tensor

    @property
    def last(self) -> Tensor:
        """int64 [B]: each row's last node; any node for rows without."""
        return (self.offsets[1:] - 1).clamp(min=0).long()

    def nodes_by_row(self, first: int, stop: int) -> Tensor:
        """int64 [B, stop - first]: the nodes number `first` to `stop` of each row; any nodes where there are none."""
        numbers = torch.arange(first, stop, dtype=torch.int32, device=self.offsets.device)
        return (self.offsets[:-1, None] + numbers).clamp(max=self.place.shape[0] - 1).long()


def pack_nodes(counts: Tensor, most: int) -> Packing:
    """counts: int32 [B], nodes of each row, at most `most`: room for B * most nodes. Asks the device nothing."""
    rows = counts.shape[0]
    offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    node = torch.arange(rows * most, dtype=torch.int32, device=counts.device)
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
    """Packed trees of chosen tokens: tokens int64, parents int32 [M]. What the host has to know of them, `counts` and
    `max_depth`, are capacities.
    """
    nothing = torch.full_like(packing.place, -1)
    return Draft(
        rows=rows,
        tokens=torch.where(packing.inside, tokens, 0),
        parents=torch.where(packing.inside, parents, nothing),
        offsets=packing.offsets,
        proposal_kinds=torch.zeros_like(packing.place, dtype=torch.int8),
        dist_index=nothing,
        row_of=packing.row_of,
        counts=(tokens.shape[0] // rows.shape[0],) * rows.shape[0],
        max_depth=depth,
        is_chain=is_chain,
        plan=plan,
    )

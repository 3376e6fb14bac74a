"""Packed batches whose shape the device decides: where each of a fixed number of nodes belongs.

Tests: tests/engine/test_graph_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


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


def pack(counts: Tensor, most: int) -> Packing:
    """counts: int32 [B], nodes of each row, at most `most`: room for B * most nodes. Asks the device nothing."""
    rows = counts.shape[0]
    offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    node = torch.arange(rows * most, dtype=torch.int32, device=counts.device)
    row_of = torch.searchsorted(offsets[1:], node, right=True).clamp(max=rows - 1)
    return Packing(offsets, row_of, node - offsets[row_of], node < offsets[-1:])

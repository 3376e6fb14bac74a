"""Layouts of packed chains: the tensors of a draft that depend on the lengths of its chains alone.

Most steps repeat a few lengths, so layouts of short chains are remembered. Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import current_stream_id, host_to_device
from specdec_kernels import TreePlan, tree_plan

MAX_REMEMBERED_NODES = 128
"""Nodes of the longest chain whose layout is remembered: enough for drafts, too few for prompts."""


class ChainLayout:
    """The parts of B deterministic chains, M nodes in all, that do not depend on tokens.

    Each part is computed when it is first read.

    Args:
        rows: Row of each request.
        counts: Nodes of each request, root included.
        device: Device of the tensors.
    """

    def __init__(self, rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> None:
        self._rows, self._counts, self._device = rows, counts, device
        self._ends = list(accumulate(counts))

    def _vector(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host integers as a tensor that may be used inside and outside of inference mode."""
        with torch.inference_mode(False):
            return host_to_device(values, dtype, self._device)

    @cached_property
    def rows(self) -> Tensor:
        """Row of each request, int32 [B]."""
        return self._vector(self._rows, torch.int32)

    @cached_property
    def offsets(self) -> Tensor:
        """First node of each request, int32 [B + 1]."""
        return self._vector([0, *self._ends], torch.int32)

    @cached_property
    def last(self) -> Tensor:
        """Last node of each request, int64 [B]."""
        return self._vector([end - 1 for end in self._ends], torch.int64)

    @cached_property
    def parents(self) -> Tensor:
        """Parent of each node, -1 for roots, int32 [M]."""
        return self._vector([parent for count in self._counts for parent in range(-1, count - 1)], torch.int32)

    @cached_property
    def row_of(self) -> Tensor:
        """Request of each node, int64 [M]."""
        return self._vector([row for row, count in enumerate(self._counts) for _ in range(count)], torch.int64)

    @cached_property
    def proposal_kinds(self) -> Tensor:
        """`ProposalKind.DETERMINISTIC` for all nodes, int8 [M]."""
        return self._vector([0] * sum(self._counts), torch.int8)

    @cached_property
    def dist_index(self) -> Tensor:
        """-1 for all nodes, since deterministic nodes have no distribution, int32 [M]."""
        return self._vector([-1] * sum(self._counts), torch.int32)

    @cached_property
    def plan(self) -> TreePlan | None:
        """Depths, ancestors and links of the nodes; None for chains that are too long to be remembered."""
        if max(self._counts, default=0) > MAX_REMEMBERED_NODES:
            return None
        with torch.inference_mode(False):
            return tree_plan(self.parents, self.offsets, max(self._counts, default=0))


def chain_layout(rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> ChainLayout:
    """Returns the layout of packed chains.

    Layouts of short chains are remembered per stream, so their tensors must not be written to.

    Args:
        rows: Row of each request.
        counts: Nodes of each request, root included.
        device: Device of the tensors.

    Returns:
        The layout. Two calls with equal arguments return the same object for short chains.
    """
    if max(counts, default=0) > MAX_REMEMBERED_NODES:
        return ChainLayout(rows, counts, device)
    return _remembered_layout(rows, counts, device, current_stream_id(device))


@lru_cache(maxsize=512)
def _remembered_layout(
    rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device, stream: int
) -> ChainLayout:
    """A layout of one stream: other streams do not wait for the copies that fill it."""
    return ChainLayout(rows, counts, device)

"""What packed chains of given lengths have in common whatever their tokens are: most steps repeat a shape.

Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import current_stream_id, host_to_device
from specdec_kernels import TreePlan, tree_plan

SHORT = 128
"""Nodes a row of a shape that is remembered: drafts, not prompts."""


class ChainLayout:
    """What of a batch of chosen chains does not depend on its tokens, each part made when it is asked for."""

    def __init__(self, rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> None:
        self._rows, self._counts, self._device = rows, counts, device
        self._ends = list(accumulate(counts))

    def _vector(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # the remembered serve in and out of it
            return host_to_device(values, dtype, self._device)

    @cached_property
    def rows(self) -> Tensor:
        return self._vector(self._rows, torch.int32)

    @cached_property
    def offsets(self) -> Tensor:
        return self._vector([0, *self._ends], torch.int32)

    @cached_property
    def last(self) -> Tensor:
        """Each row's last node, int64 [rows]."""
        return self._vector([end - 1 for end in self._ends], torch.int64)

    @cached_property
    def parents(self) -> Tensor:
        return self._vector([parent for count in self._counts for parent in range(-1, count - 1)], torch.int32)

    @cached_property
    def row_of(self) -> Tensor:
        return self._vector([row for row, count in enumerate(self._counts) for _ in range(count)], torch.int64)

    @cached_property
    def proposal_kinds(self) -> Tensor:
        return self._vector([0] * sum(self._counts), torch.int8)

    @cached_property
    def dist_index(self) -> Tensor:
        return self._vector([-1] * sum(self._counts), torch.int32)

    @cached_property
    def plan(self) -> TreePlan | None:
        """The links of its chains; None where they are too long to be remembered."""
        if max(self._counts, default=0) > SHORT:
            return None
        with torch.inference_mode(False):
            return tree_plan(self.parents, self.offsets, max(self._counts, default=0))


def chain_layout(rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> ChainLayout:
    """Packed chains of the given lengths. The tensors must not be written to: those of short chains are remembered,
    since most steps repeat a shape.
    """
    if max(counts, default=0) > SHORT:
        return ChainLayout(rows, counts, device)
    return _remembered_shape(rows, counts, device, current_stream_id(device))


@lru_cache(maxsize=512)
def _remembered_shape(rows: tuple[int, ...], counts: tuple[int, ...], device: torch.device, stream: int) -> ChainLayout:
    """Of one stream: its tensors are written behind what that stream has to do."""
    return ChainLayout(rows, counts, device)

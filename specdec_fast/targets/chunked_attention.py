"""Chunked attention of packed nodes, as Llama 4 has it: a token sees the tokens of its own chunk alone.

The chunk of a token is its position divided by the chunk's size, without the rest. The operator `tree_attention` knows
windows only: a key is visible if the query's position minus the key's is less than the window. Chunks are windows over
other positions: every node is moved to the last position of its chunk, and committed keys stay. Then the window of a
chunk's size begins at the chunk's first key, and two nodes see each other if they are in one chunk.
Tests: tests/targets/test_chunked_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.interfaces import Slots


def ancestors_and_depth_of_chunks(slots: Slots, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns the trees of a pass for `tree_attention` with a window of `chunk` tokens.

    Nothing waits for the device.

    Args:
        slots: Places of M nodes.
        chunk: Size of a chunk in tokens.

    Returns:
        Ancestor words, int32 [M, W], those of chains too; and depths that end a chunk, int32 [M].
    """
    ancestors, depth = slots.ancestors, slots.depth
    if ancestors is None or depth is None:
        ancestors, depth = _chains(slots.offsets, slots.positions.shape[0])
    left = chunk - 1 - slots.positions % chunk  # tokens between a node and the end of its chunk
    return ancestors, (depth + left).int()


def _chains(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ancestor words, int32 [count, W], and depths, int32 [count], of causal chains."""
    at = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    depth = at - offsets[torch.searchsorted(offsets, at, right=True) - 1]
    first = 32 * torch.arange(max(-(-count // 32), 1), device=offsets.device)  # node of each word's lowest bit
    seen = (depth[:, None] + 1 - first).clamp(0, 32)
    return ((1 << seen) - 1).int(), depth

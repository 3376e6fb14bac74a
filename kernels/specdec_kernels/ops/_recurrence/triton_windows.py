"""A part of the Triton kernels of convolution windows: a window moves behind the nodes that a row keeps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_window(
    window_ptr, inputs_ptr, node, kept, written, block, CHANNELS: tl.constexpr, HELD: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Moves a window by `kept` inputs, for BLOCK_C channels. A window that keeps no node stays.

    window_ptr: [HELD, C], that of the row; node: the node that each place gets, int32 [BLOCK_W]. Places of -1 get an
    older input of the window: zeros unless it was `written`.
    """
    place = tl.arange(0, BLOCK_W)
    channel = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (place[:, None] < HELD) & (channel[None, :] < CHANNELS) & (kept > 0)
    older = place + kept
    old = tl.load(
        window_ptr + older[:, None] * CHANNELS + channel[None, :],
        mask=inside & (older[:, None] < HELD) & written, other=0.0,
    )  # fmt: skip
    new = tl.load(
        inputs_ptr + node[:, None].to(tl.int64) * CHANNELS + channel[None, :], mask=inside & (node[:, None] >= 0),
        other=0.0,
    )  # fmt: skip
    moved = tl.where(node[:, None] >= 0, new, old)
    tl.debug_barrier()  # other threads read what this one overwrites
    tl.store(window_ptr + place[:, None] * CHANNELS + channel[None, :], moved, mask=inside)

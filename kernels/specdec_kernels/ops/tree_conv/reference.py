"""Plain PyTorch definition of tree_conv."""

from __future__ import annotations

import torch
from torch import Tensor

from .._recurrence.packed_nodes import check_advance, check_nodes, check_tree, check_tree_shapes, walk_nodes


def check_window(op: str, inputs: Tensor, window: Tensor) -> None:
    """Raises ValueError unless inputs [M, C] and windows [R, W - 1, C] fit."""
    if inputs.dim() != 2 or window.dim() != 3 or window.shape[2] != inputs.shape[1]:
        raise ValueError(
            f"{op}: inputs is {list(inputs.shape)} and window {list(window.shape)}; expected [M, C] and [R, W - 1, C]"
        )


def check_activation(activation: str | None) -> None:
    """Raises ValueError for an unknown activation."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"tree_conv: got activation {activation!r}; expected None or 'silu'")


def check(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    activation: str | None = None,
    advance: bool = False,
) -> None:
    """Raises ValueError for shapes, dtypes or an activation that do not fit; the arguments are those of `tree_conv`."""
    op = "tree_conv"
    check_window(op, inputs, window)
    if weight.shape != (inputs.shape[1], window.shape[1] + 1) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"{op}: weight is {list(weight.shape)}; expected [{inputs.shape[1]}, {window.shape[1] + 1}], and bias "
            f"[{inputs.shape[1]}] or None"
        )
    check_activation(activation)
    check_tree_shapes(op, inputs.shape[0], rows, lengths, offsets, parents)
    check_advance(op, parents, advance)


def check_data(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    activation: str | None = None,
    advance: bool = False,
) -> None:
    """Raises ValueError for rows, offsets or parents that do not fit; the arguments are those of `tree_conv`."""
    check_nodes("tree_conv", len(inputs), len(window), rows, lengths, offsets, parents)


def tree_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    activation: str | None = None,
    advance: bool = False,
) -> Tensor:
    """Causal convolution of each channel over packed trees: along the ancestors of a node, then its committed text.

    The record of a node is its input: `window_commit` keeps the inputs of an accepted path. The bits of a node depend
    on its ancestors only.

    On a GPU this reference waits for the device. The Triton launches do not: a CUDA graph can capture them.

    Args:
        inputs: [M, C], any float dtype.
        weight: [C, W]; the last column belongs to the node itself.
        bias: [C] or None.
        window: The last W - 1 inputs of committed texts, oldest first, [R, W - 1, C]. Only `advance` writes to it.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request, int32 [B]. The window of a text of 0 tokens counts as zeros.
        offsets: First node of each request, int32 [B + 1].
        parents: Parent of each node by its index in its tree, -1 at roots, int32 [M]; None for chains.
        activation: None, or "silu" ("swish").
        advance: Commit chains at once: the window moves behind the last node.

    Returns:
        [M, C] in the dtype of `inputs`. Nodes from offsets[B] on have zeros.

    Raises:
        ValueError: If shapes, dtypes, parents or the activation do not fit.
    """
    check(inputs, weight, bias, window, rows, lengths, offsets, parents, activation, advance)
    op, width = "tree_conv", weight.shape[1]
    check_tree(op, len(inputs), len(window), rows, lengths, offsets, parents)
    outputs = torch.zeros_like(inputs)
    wide = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    taps, shift = weight.to(wide).t(), None if bias is None else bias.to(wide)
    seen: dict[int, Tensor] = {}
    row_of, counts = rows.tolist(), lengths.tolist()
    for request, node, parent in walk_nodes(op, offsets, parents):
        if parent >= 0:
            before = seen[parent]
        else:
            own = window[row_of[request]]
            before = own.clone() if counts[request] else torch.zeros_like(own)
        reach = torch.cat([before, inputs[node][None]])
        total = reach[0].to(wide) * taps[0] if shift is None else reach[0].to(wide) * taps[0] + shift
        for at in range(1, width):
            total = total + reach[at].to(wide) * taps[at]
        outputs[node] = (total if activation is None else total / (1 + (-total).exp())).to(inputs.dtype)
        seen[node] = reach[1:]
    if advance:
        for row, start, end in zip(row_of, offsets.tolist(), offsets[1:].tolist()):
            if end > start:
                window[row] = seen[end - 1]
    return outputs

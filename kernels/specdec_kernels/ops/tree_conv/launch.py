"""Triton backend of tree_conv: argument checks, launches, variants."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import check_whole_rows, power_of_two
from .reference import check, check_data

NODES, CHANNELS = 8, 128
"""Nodes and channels of a program."""


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
    """Runs the operator in one launch; `advance` takes a second one, after all windows have been read.

    Grids follow from shapes, and trees are read on the device: a CUDA graph can capture the call. The bits of a node
    depend on its ancestors only. On a GPU rows are not checked outside of debug mode. Nodes of a row that does not
    exist get zeros.

    Returns:
        [M, C].
    """
    from .triton_kernel import advance_windows, convolve

    check(inputs, weight, bias, window, rows, lengths, offsets, parents, activation, advance)
    if argument_checks.can_read_values(inputs):
        check_data(inputs, weight, bias, window, rows, lengths, offsets, parents, activation, advance)
    check_whole_rows("tree_conv", "window", window, "[R, W - 1, C]")
    given, weight, bias = in_one_piece(inputs, weight, bias)
    rows, lengths, offsets, parents = in_one_piece(rows, lengths, offsets, parents)
    outputs = torch.empty_like(given)
    (nodes, channels), (capacity, held, _), batch = given.shape, window.shape, len(rows)
    if given.numel():
        blocks = -(-channels // CHANNELS)
        convolve[(-(-nodes // NODES), blocks)](
            given, weight, bias, window, rows, lengths, offsets, parents, outputs, batch, nodes, capacity,
            window.stride(0), CHANNELS=channels, HELD=held, BIAS=bias is not None, SILU=activation is not None,
            TREE=parents is not None, NODES=NODES, BLOCK_C=CHANNELS, num_warps=4, num_stages=1,
        )  # fmt: skip
        if advance and held and batch:
            advance_windows[(blocks, batch)](
                window, given, rows, lengths, offsets, nodes, capacity, window.stride(0), CHANNELS=channels, HELD=held,
                BLOCK_W=power_of_two(held, 1), BLOCK_C=CHANNELS, num_warps=4, num_stages=1,
            )  # fmt: skip
    return outputs


_INTEGERS = dict.fromkeys(("rows_ptr", "lengths_ptr", "offsets_ptr"), "*i32")
_SIZES = {**dict.fromkeys(("num_nodes", "num_rows"), "i32"), "window_stride": "i32:16"}


def _variant(name: str, dtype: str, everyday: bool = False, tree: bool = True) -> Variant:
    floats = dict.fromkeys(("inputs_ptr", "weight_ptr", "bias_ptr", "window_ptr", "outputs_ptr"), f"*{dtype}")
    constants = {"CHANNELS": 8192, "HELD": 3, "BIAS": True, "SILU": True, "TREE": tree, "NODES": NODES}
    return Variant(
        f"tree_conv/{name}",
        "tree_conv.triton_kernel:convolve",
        {**floats, **_INTEGERS, "parents_ptr": "*i32", "num_requests": "i32", **_SIZES},
        {**constants, "BLOCK_C": CHANNELS},
        stages=1,
        everyday=("sm_90",) if everyday else (),
    )


VARIANTS = [
    _variant("bf16", "bf16", everyday=True),
    _variant("fp32", "fp32"),
    _variant("bf16 chains", "bf16", tree=False),
    Variant(
        "tree_conv/advance bf16", "tree_conv.triton_kernel:advance_windows",
        {"window_ptr": "*bf16", "inputs_ptr": "*bf16", **_INTEGERS, **_SIZES},
        {"CHANNELS": 8192, "HELD": 3, "BLOCK_W": 4, "BLOCK_C": CHANNELS}, stages=1,
    ),
]  # fmt: skip

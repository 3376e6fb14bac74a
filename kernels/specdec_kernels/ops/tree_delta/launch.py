"""Triton backends of tree_delta: argument checks, launches, variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import NODES, STAGES, check_whole_rows, choose_blocks, constants_of, empty_or_zero
from .._recurrence.variants import node_variant
from .reference import DeltaArguments, check, check_data

REGISTERS = 168
"""Registers of a thread of the triangular system: three programs fit on a multiprocessor. Ceilings record spills."""


def _launch(kernel: Any, given: DeltaArguments, **options: Any) -> tuple[Tensor, Tensor]:
    check(given)
    if argument_checks.can_read_values(given.state):
        check_data(*given)
    check_whole_rows("tree_delta", "state", given.state, "float32 [R, H, K, V]")
    state, num_requests = given.state, len(given.rows)
    inputs, batch = in_one_piece(*given[:5]), in_one_piece(given.rows, given.lengths, given.offsets, given.parents)
    outputs, corrections = (empty_or_zero(inputs[2], kind, num_requests) for kind in (inputs[2].dtype, torch.float32))
    if num_requests and given.value.numel():
        blocks = choose_blocks(*state.shape[2:])
        kernel[blocks.grid(state, num_requests)](
            *inputs, state, *batch, outputs, corrections, len(given.value), len(state), state.stride(0),
            **constants_of(state, given.key, given.log_gate, None, blocks), TREE=given.parents is not None,
            ADVANCE=given.advance, num_warps=blocks.warps, **options,
        )  # fmt: skip
    return outputs, corrections


def tree_delta(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Runs the operator as a triangular system, in one launch.

    It reads each state once for each tile of 16 nodes; with `advance` twice, and writes it once.

    If there are no more nodes than requests, as without drafts, it runs node after node: a tile would be mostly empty.
    The form depends on the batch, not only on a request: counts [1, 1] run in sequence, [1, 5] as a triangle. With
    padded inputs, as in CUDA graphs, the capacity counts. So the bits of a node depend on other requests too.

    The grid follows from shapes, and trees are read on the device: a CUDA graph can capture the call. Results agree
    with the reference to rounding. The bits of a node may change with its place in the tree.

    On a GPU rows are not checked outside of debug mode. Nodes of a row that does not exist get uninitialised
    outputs and corrections.

    Returns:
        Outputs and corrections, [M, H, V] each.
    """
    from .triton_kernel import solve_nodes

    given = DeltaArguments(*args, **named)
    if len(given.value) <= len(given.rows):
        return tree_delta_sequence(*given)
    return _launch(solve_nodes, given, NODES=NODES, num_stages=STAGES, maxnreg=REGISTERS)


def tree_delta_sequence(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Runs the operator node after node, in one launch that a CUDA graph can capture.

    The bits of a node depend on its ancestors only, and equal those of one node at a time. A tree takes time for each
    node, and for the path to each node that does not follow its parent. Rows are treated as by `tree_delta`.

    Returns:
        Outputs and corrections, [M, H, V] each.
    """
    from .triton_kernel import follow_nodes

    return _launch(follow_nodes, DeltaArguments(*args, **named), num_stages=1, enable_fp_fusion=False)


def _variant(
    name: str, everyday: bool = False, gate: int = 0, tree: bool = True, sequence: bool = False, dtype: str = "bf16"
) -> Variant:
    """A variant with the shape of Qwen3-Next."""
    return node_variant(
        "tree_delta", name, ("query", "key", "value", "beta", "outputs"), ("gate", "state", "corrections"),
        (32, 16, 128, 128), REGISTERS, everyday=everyday, gate=gate, tree=tree, sequence=sequence, dtype=dtype,
    )  # fmt: skip


VARIANTS = [
    _variant("triangle", everyday=True),
    _variant("triangle fp32", dtype="fp32"),
    _variant("triangle prompt", tree=False),
    _variant("triangle gates of channels", gate=1),
    _variant("triangle prompt gates of channels", gate=1, tree=False),
    _variant("sequence", everyday=True, sequence=True),
    _variant("sequence gates of channels", gate=1, sequence=True),
]

"""Triton backends of tree_delta: argument checks, launches, variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import NODES, STAGES, check_whole_rows, choose_blocks, constants_of, empty_or_zero
from .reference import check, check_data

REGISTERS = 168
"""Registers of a thread of the triangular system: three programs fit on a multiprocessor. Ceilings record spills."""


def _launch(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
    advance: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    given = (query, key, value, log_gate, beta, state, rows, lengths, offsets, parents, advance)
    check(*given)
    if argument_checks.can_read_values(state):
        check_data(*given)
    check_whole_rows("tree_delta", "state", state, "float32 [R, H, K, V]")
    inputs, batch = in_one_piece(query, key, value, log_gate, beta), in_one_piece(rows, lengths, offsets)
    tree = None if parents is None else parents.contiguous()
    outputs, corrections = (empty_or_zero(inputs[2], dtype, len(rows)) for dtype in (value.dtype, torch.float32))
    if len(rows) and value.numel():
        blocks = choose_blocks(*state.shape[2:])
        kernel[blocks.grid(state, len(rows))](
            *inputs, state, *batch, tree, outputs, corrections, len(value), len(state), state.stride(0),
            **constants_of(state, key, log_gate, None, blocks), TREE=tree is not None, ADVANCE=advance,
            num_warps=blocks.warps, **options,
        )  # fmt: skip
    return outputs, corrections


def tree_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    advance: bool = False,
) -> tuple[Tensor, Tensor]:
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

    given = (query, key, value, log_gate, beta, state, rows, lengths, offsets, parents, advance)
    if len(value) <= len(rows):
        return tree_delta_sequence(*given)
    return _launch(solve_nodes, *given, NODES=NODES, num_stages=STAGES, maxnreg=REGISTERS)


def tree_delta_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    advance: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs the operator node after node, in one launch that a CUDA graph can capture.

    The bits of a node depend on its ancestors only, and equal those of one node at a time. A tree takes time for each
    node, and for the path to each node that does not follow its parent. Rows are treated as by `tree_delta`.

    Returns:
        Outputs and corrections, [M, H, V] each.
    """
    from .triton_kernel import follow_nodes

    given = (query, key, value, log_gate, beta, state, rows, lengths, offsets, parents, advance)
    return _launch(follow_nodes, *given, num_stages=1, enable_fp_fusion=False)


def _variant(
    name: str, everyday: bool = False, gate: int = 0, tree: bool = True, sequence: bool = False, dtype: str = "bf16",
) -> Variant:  # fmt: skip
    """A variant with the shape of Qwen3-Next; prompts are chains that advance."""
    vectors = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "beta_ptr", "outputs_ptr"), f"*{dtype}")
    floats = dict.fromkeys(("gate_ptr", "state_ptr", "corrections_ptr"), "*fp32")
    integers = dict.fromkeys(("rows_ptr", "lengths_ptr", "offsets_ptr", "parents_ptr"), "*i32")
    sizes = {**dict.fromkeys(("num_nodes", "num_rows"), "i32"), "state_stride": "i32:16"}
    blocks = choose_blocks(128, 128)
    model = {"HEADS": 32, "GROUPS": 16, "KEYS": 128, "WIDTH": 128, "BLOCK_K": blocks.keys, "BLOCK_V": blocks.columns}
    constants = {**model, "GATE": gate, "TREE": tree, "ADVANCE": not tree}
    return Variant(
        f"tree_delta/{name}",
        f"tree_delta.triton_kernel:{'follow_nodes' if sequence else 'solve_nodes'}",
        {**vectors, **floats, **integers, **sizes},
        constants if sequence else {**constants, "NODES": NODES},
        blocks.warps,
        stages=1 if sequence else STAGES,
        everyday=("sm_90",) if everyday else (),
        fusion=not sequence,
        most_registers=None if sequence else REGISTERS,
    )


VARIANTS = [
    _variant("triangle", everyday=True),
    _variant("triangle fp32", dtype="fp32"),
    _variant("triangle prompt", tree=False),
    _variant("triangle gates of channels", gate=1),
    _variant("triangle prompt gates of channels", gate=1, tree=False),
    _variant("sequence", everyday=True, sequence=True),
    _variant("sequence gates of channels", gate=1, sequence=True),
]

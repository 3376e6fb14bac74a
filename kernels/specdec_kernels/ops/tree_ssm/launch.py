"""Triton backends of tree_ssm: argument checks, launches, variants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import NODES, STAGES, check_whole_rows, choose_blocks, constants_of, empty_or_zero
from .reference import check, check_data

REGISTERS = 128
"""Registers of a thread of the triangular system: four programs fit on a multiprocessor. Ceilings record spills."""


def _run(
    triangle: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
    decay: Tensor | None,
    advance: bool,
) -> Tensor:
    from .triton_kernel import follow_nodes, solve_nodes

    given = (query, key, value, log_gate, state, rows, lengths, offsets, parents, decay, advance)
    check(*given)
    if argument_checks.can_read_values(state):
        check_data(*given)
    check_whole_rows("tree_ssm", "state", state, "float32 [R, H, K, V]")
    inputs, batch = in_one_piece(query, key, value, log_gate), in_one_piece(rows, lengths, offsets)
    tree = None if parents is None else parents.contiguous()
    rates = None if decay is None else decay.contiguous()
    outputs = empty_or_zero(inputs[2], value.dtype, len(rows))
    if len(rows) == 0 or value.numel() == 0:
        return outputs
    blocks = choose_blocks(*state.shape[2:])
    grid, numbers = blocks.grid(state, len(rows)), (len(value), len(state), state.stride(0))
    constants: dict[str, Any] = constants_of(state, key, log_gate, decay, blocks)
    constants |= {"TREE": tree is not None, "ADVANCE": advance, "num_warps": blocks.warps}
    if triangle:
        solve_nodes[grid](
            *inputs, state, *batch, tree, outputs, *numbers, NODES=NODES, **constants, num_stages=STAGES,
            maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        follow_nodes[grid](
            *inputs, rates, state, *batch, tree, outputs, *numbers, **constants, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return outputs


def tree_ssm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    decay: Tensor | None = None,
    advance: bool = False,
) -> Tensor:
    """Runs the operator as a triangular system, in one launch.

    It reads each state once for each tile of 16 nodes; with `advance` twice, and writes it once.

    With `decay` (Mamba-1) it runs node after node: each element of the state has a gate of its own, so the system would
    take an exponential for each pair of nodes and each element, in place of one for each node and element. It does so
    too if there are no more nodes than requests, as without drafts: a tile would be mostly empty.

    The form depends on the batch, not only on a request: counts [1, 1] run in sequence, [1, 5] as a triangle. With
    padded inputs, as in CUDA graphs, the capacity counts. So the bits of a node depend on other requests too.

    The grid follows from shapes, and trees are read on the device: a CUDA graph can capture the call. Results agree
    with the reference to rounding. Without `decay`, the bits of a node may change with its place in the tree.

    On a GPU rows are not checked outside of debug mode. Nodes of a row that does not exist get uninitialised
    outputs.

    Returns:
        Outputs [M, H, V].
    """
    given = (query, key, value, log_gate, state, rows, lengths, offsets, parents, decay, advance)
    return _run(decay is None and len(value) > len(rows), *given)


def tree_ssm_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    state: Tensor,
    rows: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    parents: Tensor | None = None,
    decay: Tensor | None = None,
    advance: bool = False,
) -> Tensor:
    """Runs the operator node after node, in one launch that a CUDA graph can capture.

    The bits of a node depend on its ancestors only, and equal those of one node at a time. A tree takes time for each
    node, and for the path to each node that does not follow its parent. Rows are treated as by `tree_ssm`.

    Returns:
        Outputs [M, H, V].
    """
    return _run(False, query, key, value, log_gate, state, rows, lengths, offsets, parents, decay, advance)


def _variant(
    name: str, everyday: bool = False, gate: int = 0, tree: bool = True, sequence: bool = False, dtype: str = "bf16",
) -> Variant:  # fmt: skip
    """A variant with the shape of Mamba-2 with 128 heads, or of Mamba-1 for gates of elements."""
    vectors = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "outputs_ptr"), f"*{dtype}")
    floats = dict.fromkeys(("gate_ptr", "state_ptr", *(("decay_ptr",) if sequence else ())), "*fp32")
    integers = dict.fromkeys(("rows_ptr", "lengths_ptr", "offsets_ptr", "parents_ptr"), "*i32")
    sizes = {**dict.fromkeys(("num_nodes", "num_rows"), "i32"), "state_stride": "i32:16"}
    heads, groups, keys, width = (1, 1, 16, 8192) if gate == 2 else (128, 8, 128, 64)
    blocks = choose_blocks(keys, width)
    model = {"HEADS": heads, "GROUPS": groups, "KEYS": keys, "WIDTH": width}
    constants = {**model, "BLOCK_K": blocks.keys, "BLOCK_V": blocks.columns, "GATE": gate, "TREE": tree}
    constants["ADVANCE"] = not tree
    return Variant(
        f"tree_ssm/{name}",
        f"tree_ssm.triton_kernel:{'follow_nodes' if sequence else 'solve_nodes'}",
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
    _variant("sequence", sequence=True),
    _variant("sequence gates of elements", everyday=True, gate=2, sequence=True),
    _variant("sequence prompt gates of elements", gate=2, tree=False, sequence=True),
]

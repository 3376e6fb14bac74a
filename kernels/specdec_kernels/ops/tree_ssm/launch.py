"""Triton backends of tree_ssm: argument checks, launches, variants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch import argument_checks
from ...triton_shared.aot_config import Variant
from .._recurrence.cpu_inputs import in_one_piece
from .._recurrence.gpu_blocks import NODES, STAGES, check_whole_rows, choose_blocks, constants_of, empty_or_zero
from .._recurrence.variants import node_variant
from .reference import SsmArguments, check, check_data

REGISTERS = 128
"""Registers of a thread of the triangular system: four programs fit on a multiprocessor. Ceilings record spills."""


def _launch(kernel: Any, given: SsmArguments, decay: tuple[Tensor | None, ...], **options: Any) -> Tensor:
    check(given)
    if argument_checks.can_read_values(given.state):
        check_data(*given)
    check_whole_rows("tree_ssm", "state", given.state, "float32 [R, H, K, V]")
    state, num_requests = given.state, len(given.rows)
    inputs, batch = in_one_piece(*given[:4]), in_one_piece(given.rows, given.lengths, given.offsets, given.parents)
    outputs = empty_or_zero(inputs[2], inputs[2].dtype, num_requests)
    if num_requests and given.value.numel():
        blocks = choose_blocks(*state.shape[2:])
        kernel[blocks.grid(state, num_requests)](
            *inputs, *in_one_piece(*decay), state, *batch, outputs, len(given.value), len(state), state.stride(0),
            **constants_of(state, given.key, given.log_gate, given.decay, blocks), TREE=given.parents is not None,
            ADVANCE=given.advance, num_warps=blocks.warps, **options,
        )  # fmt: skip
    return outputs


def tree_ssm(*args: Any, **named: Any) -> Tensor:
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
    from .triton_kernel import solve_nodes

    given = SsmArguments(*args, **named)
    if given.decay is not None or len(given.value) <= len(given.rows):
        return tree_ssm_sequence(*given)
    return _launch(solve_nodes, given, (), NODES=NODES, num_stages=STAGES, maxnreg=REGISTERS)


def tree_ssm_sequence(*args: Any, **named: Any) -> Tensor:
    """Runs the operator node after node, in one launch that a CUDA graph can capture.

    The bits of a node depend on its ancestors only, and equal those of one node at a time. A tree takes time for each
    node, and for the path to each node that does not follow its parent. Rows are treated as by `tree_ssm`.

    Returns:
        Outputs [M, H, V].
    """
    from .triton_kernel import follow_nodes

    given = SsmArguments(*args, **named)
    return _launch(follow_nodes, given, (given.decay,), num_stages=1, enable_fp_fusion=False)


def _variant(
    name: str, everyday: bool = False, gate: int = 0, tree: bool = True, sequence: bool = False, dtype: str = "bf16"
) -> Variant:
    """A variant with the shape of Mamba-2 with 128 heads, or of Mamba-1 for gates of elements."""
    floats = ("gate", "state", *(("decay",) if sequence else ()))
    return node_variant(
        "tree_ssm", name, ("query", "key", "value", "outputs"), floats,
        (1, 1, 16, 8192) if gate == 2 else (128, 8, 128, 64), REGISTERS, everyday=everyday, gate=gate, tree=tree,
        sequence=sequence, dtype=dtype,
    )  # fmt: skip


VARIANTS = [
    _variant("triangle", everyday=True),
    _variant("triangle fp32", dtype="fp32"),
    _variant("triangle prompt", tree=False),
    _variant("triangle gates of channels", gate=1),
    _variant("sequence", sequence=True),
    _variant("sequence gates of elements", everyday=True, gate=2, sequence=True),
    _variant("sequence prompt gates of elements", gate=2, tree=False, sequence=True),
]

"""Variants of the recurrent kernels that are compiled ahead of time. Tests: tests/machine_code/test_machine_code.py."""

from __future__ import annotations

from collections.abc import Sequence

from ...triton_shared.aot_config import Variant
from .gpu_blocks import NODES, STAGES, choose_blocks


def node_variant(
    op: str,
    name: str,
    vectors: Sequence[str],
    floats: Sequence[str],
    shape: tuple[int, int, int, int],
    registers: int,
    *,
    everyday: bool,
    gate: int,
    tree: bool,
    sequence: bool,
    dtype: str,
) -> Variant:
    """Returns a variant of a kernel over nodes.

    Args:
        op: The operator.
        name: Name of the variant.
        vectors: Arguments that point to `dtype`, the outputs among them, without their ending.
        floats: Arguments that point to float32, without their ending.
        shape: Heads, groups of heads, key channels and columns.
        registers: Registers of a thread of the triangular system.
        everyday: It is compiled for sm_90 in everyday tests.
        gate: HEAD, CHANNEL or ELEMENT of `triton_nodes.py`.
        tree: Trees, else prompts: chains that advance.
        sequence: Node after node, else the triangular system.
        dtype: Such as "bf16".
    """
    heads, groups, keys, width = shape
    blocks = choose_blocks(keys, width)
    pointers = {f"{each}_ptr": f"*{dtype}" for each in vectors} | {f"{each}_ptr": "*fp32" for each in floats}
    integers = dict.fromkeys(("rows_ptr", "lengths_ptr", "offsets_ptr", "parents_ptr"), "*i32")
    sizes = {**dict.fromkeys(("num_nodes", "num_rows"), "i32"), "state_stride": "i32:16"}
    model = {"HEADS": heads, "GROUPS": groups, "KEYS": keys, "WIDTH": width}
    constants = {**model, "BLOCK_K": blocks.keys, "BLOCK_V": blocks.columns, "GATE": gate, "TREE": tree}
    return Variant(
        f"{op}/{name}",
        f"{op}.triton_kernel:{'follow_nodes' if sequence else 'solve_nodes'}",
        {**pointers, **integers, **sizes},
        {**constants, "ADVANCE": not tree, **({} if sequence else {"NODES": NODES})},
        blocks.warps,
        stages=1 if sequence else STAGES,
        everyday=("sm_90",) if everyday else (),
        fusion=not sequence,
        most_registers=None if sequence else registers,
    )

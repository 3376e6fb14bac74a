"""What the Triton launches of recurrent layers share: blocks, constants, estimates, and the inputs of kernels.

Tests: tests/kernels/test_recurrent_estimates.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_KEYS = 512
"""Key channels that a program holds in registers."""
NODES = 16
"""Nodes of a tile: the rows of the smallest matrix instruction. Trees that are verified rarely have more."""
STAGES = 5
"""Parts of a state that are on their way at a time, in a triangular system. With 128 key channels there are eight."""
_ELEMENTS, _WIDEST = 4096, 128
"""Elements of the state in one program, and columns: enough programs to fill a GPU with one request of 32 heads."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a state [R, H, K, V] is divided among programs.

    Attributes:
        keys: Key channels of a program, a power of two that is at least K.
        columns: Columns of a program.
        warps: Warps of a program.
    """

    keys: int
    columns: int
    warps: int

    def grid(self, state: Tensor, batch: int) -> tuple[int, int, int]:
        """Returns the grid: blocks of columns, heads, requests."""
        return -(-state.shape[3] // self.columns), state.shape[1], batch


def power_of_two(count: int, least: int) -> int:
    """Returns the smallest power of two that is at least `count` and at least `least`, a power of two."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def choose_blocks(keys: int, width: int) -> Blocks:
    """Chooses the blocks for a state of K key channels and V columns."""
    rows = power_of_two(keys, 16)
    columns = min(max(_ELEMENTS // rows, 16), _WIDEST, power_of_two(width, 16))
    return Blocks(rows, columns, 8 if rows * columns > _ELEMENTS else 4)


@dataclass(frozen=True, slots=True)
class Work:
    """What a call of a triangular system takes.

    Attributes:
        bytes: Bytes that it must read and write without `advance`: each state once, and float32 inputs and results of
            all nodes.
        products: Multiplications in its matrix instructions, those of empty rows of tiles included.
    """

    bytes: int
    products: int


def triangle_work(
    batch: int, nodes: int, heads: int, groups: int, keys: int, width: int, *, delta: bool = True
) -> Work:
    """Estimates a call without a GPU.

    Args:
        batch: Requests.
        nodes: Nodes of each.
        heads: Heads.
        groups: Groups of heads that share a key.
        keys: Key channels.
        width: Columns.
        delta: The delta rule, else sums of products.

    Returns:
        Its bytes and products.
    """
    blocks, results = choose_blocks(keys, width), 3 if delta else 2
    tiles = -(-nodes // NODES)
    pairs = tiles * (tiles + 1) // 2
    reads = tiles * (2 if delta else 1) * NODES * blocks.keys * blocks.columns
    ancestors = pairs * (2 if delta else 1) * NODES * NODES * blocks.keys
    outputs = (tiles + (pairs - tiles) * (2 if delta else 1)) * NODES * NODES * blocks.columns
    programs = batch * heads * -(-width // blocks.columns)
    node = 2 * groups * keys + results * heads * width + (2 if delta else 1) * heads
    return Work(4 * batch * (heads * keys * width + nodes * node), 3 * programs * (reads + ancestors + outputs))


def why_not_registers(state: Tensor) -> str | None:
    """Returns why a program cannot hold a part of the state, or None."""
    if state.dim() == 4 and state.shape[2] > MOST_KEYS:
        return f"state has {state.shape[2]} key channels; this kernel holds at most {MOST_KEYS}"
    return None


def why_not_program(state: Tensor) -> str | None:
    """Returns why the programs of a recurrence cannot serve this state here, or None."""
    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}; these kernels need products in tf32x3 and maxnreg of CUDA"
    return why_not_registers(state)


def gate_kind(log_gate: Tensor, decay: Tensor | None) -> int:
    """Returns the constant GATE of a kernel: HEAD, CHANNEL or ELEMENT of `triton_nodes.py`."""
    return 2 if decay is not None else log_gate.dim() - 2


def constants_of(state: Tensor, key: Tensor, log_gate: Tensor, decay: Tensor | None, blocks: Blocks) -> dict[str, int]:
    """Returns the constants of a kernel that follow from the model."""
    _, heads, keys, width = state.shape
    return {
        "HEADS": heads, "GROUPS": key.shape[1], "KEYS": keys, "WIDTH": width, "BLOCK_K": blocks.keys,
        "BLOCK_V": blocks.columns, "GATE": gate_kind(log_gate, decay),
    }  # fmt: skip


def check_whole_rows(op: str, name: str, rows: Tensor, shape: str) -> None:
    """Raises ValueError unless each row of a tensor is contiguous. Rows themselves may lie apart.

    Args:
        op: Name of the operator, for the message.
        name: Name of the tensor.
        rows: The tensor.
        shape: What is expected, in words.

    Raises:
        ValueError: If the parts of a row lie apart.
    """
    step = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:])):
        if size > 1 and stride != step:
            raise ValueError(
                f"{op}: {name} {list(rows.shape)} has rows that are not contiguous; expected {shape}; copy it"
            )
        step *= size


def empty_or_zero(nodes: Tensor, dtype: torch.dtype, batch: int) -> Tensor:
    """Returns memory for results of nodes; zeros if there is no request, so that no program writes them."""
    return torch.empty_like(nodes, dtype=dtype) if batch else torch.zeros_like(nodes, dtype=dtype)

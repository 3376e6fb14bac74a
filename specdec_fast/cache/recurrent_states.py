"""The states of recurrent layers beside the paged cache: one committed state per row, and records of staged nodes.

A pass reads committed states and writes records: the input of each convolution, and the key, the added value and the
gate of each recurrence. A commit replays the records of the accepted path. So rejected nodes never touch a state, and a
node costs its record, not a state. Tests: tests/cache/test_recurrent_states.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import state_commit, window_commit


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Window of a causal convolution.

    Attributes:
        length: Inputs that it remembers: one less than its width.
        channels: Its channels.
    """

    length: int
    channels: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """State of a recurrence.

    Attributes:
        heads: Its heads.
        key_dim: Size of a key.
        value_dim: Size of a value.
        groups: Groups of heads that share a key.
        gates: Log gates of one node.
    """

    heads: int
    key_dim: int
    value_dim: int
    groups: int
    gates: int


@dataclass(slots=True)
class Record:
    """What the nodes of a pass add to a state.

    Attributes:
        key: [M, G, K].
        value: [M, H, V]: corrections of a delta rule, else values.
        log_gate: [M, H] or [M, H, K]; with `decay`, steps [M, H, V].
        decay: [H, K, V] or None.
    """

    key: Tensor
    value: Tensor
    log_gate: Tensor
    decay: Tensor | None = None


class RecurrentStates:
    """Convolution windows and recurrent states of all rows.

    Args:
        shapes: Window or state of each place in the model where tokens mix, in the order of their places.
        max_rows: R.
        dtype: Dtype of convolution inputs.
        device: Device of all tensors.

    Attributes:
        windows: By place, [R, length, channels].
        states: By place, float32 [R, H, K, V]; float64 for a model in float64.
        inputs: Inputs of convolutions of the nodes of the last pass, by place, [M, channels].
        records: Records of the nodes of the last pass, by place.

    Raises:
        ValueError: If the states do not fit into memory.
    """

    def __init__(
        self,
        shapes: Sequence[WindowShape | StateShape],
        *,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shapes = list(shapes)
        self.windows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.records: dict[int, Record] = {}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        try:
            for place, shape in enumerate(shapes):
                if isinstance(shape, WindowShape):
                    self.windows[place] = torch.zeros(
                        max_rows, shape.length, shape.channels, dtype=dtype, device=device
                    )
                else:
                    size = (max_rows, shape.heads, shape.key_dim, shape.value_dim)
                    self.states[place] = torch.zeros(size, dtype=wide, device=device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
                raise
            size_in_gib = max_rows * self.bytes_per_row(dtype) / 2**30
            raise ValueError(
                f"cache: got {max_rows} rows, whose recurrent states take {size_in_gib:,.1f} GiB and do not fit into "
                f"the memory of {device}; expected less; lower max_rows"
            ) from error

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the committed windows and states of one row.

        Args:
            dtype: Dtype of convolution inputs.
        """
        wide, total = (8 if dtype == torch.float64 else 4), 0
        for shape in self.shapes:
            if isinstance(shape, WindowShape):
                total += shape.length * shape.channels * dtype.itemsize
            else:
                total += shape.heads * shape.key_dim * shape.value_dim * wide
        return total

    def bytes_per_node(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the records of one staged node.

        Args:
            dtype: Dtype of convolution inputs and keys.
        """
        wide, total = (8 if dtype == torch.float64 else 4), 0
        for shape in self.shapes:
            if isinstance(shape, WindowShape):
                total += shape.channels * dtype.itemsize
            else:
                total += (shape.groups * shape.key_dim + shape.heads * shape.value_dim + shape.gates) * wide
        return total

    def begin(self) -> None:
        """Drops the records of the last pass, before another writes its own."""
        self.inputs.clear()
        self.records.clear()

    def commit(self, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
        """Moves the states of rows behind the last nodes of accepted paths, and drops all records.

        Args:
            rows: Row of each request, int32 [B].
            lengths: Committed tokens of each request before this step, int32 [B].
            path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].

        Raises:
            RuntimeError: If a place has no record of the last pass. No state has changed then.
        """
        missing = [*(self.windows.keys() - self.inputs.keys()), *(self.states.keys() - self.records.keys())]
        if missing:
            raise RuntimeError(
                f"recurrent states: got no records of {len(missing)} of {len(self.shapes)} places to commit; expected "
                "a pass over the nodes of the path before each commit"
            )
        for place, inputs in self.inputs.items():
            window_commit(self.windows[place], inputs, rows, lengths, path)
        for place, record in self.records.items():
            kept = (record.key, record.value, record.log_gate)
            state_commit(self.states[place], *kept, rows, lengths, path, record.decay)
        self.begin()

    def fork(self, source: int, row: int) -> None:
        """Copies the committed states of one row to another."""
        for each in (*self.windows.values(), *self.states.values()):
            each[row] = each[source]

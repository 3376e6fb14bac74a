"""The states of recurrent layers beside the paged cache: one committed state per row, and records of staged nodes.

A pass reads committed states and writes records: the input of each convolution, and the key, the added value and the
gate of each recurrence. A commit replays the records of the accepted path. So rejected nodes never touch a state, and a
node costs its record, not a state. Tests: tests/cache/test_recurrent_states.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.cache.shapes import StateShape, WindowShape, fitting_into_memory
from specdec_fast.core.device_transfer import host_to_device, table_to_device
from specdec_kernels import state_commit, window_commit

LONGEST_HISTORY = 64
"""Tokens of a row after which its state is saved anew. A pass of more keeps no records: it reads prompts."""
_UNKNOWN = 2**62
"""Base of a row whose saved state is being written."""


@dataclass(frozen=True, slots=True)
class AdvancedPass:
    """The records of a pass that was committed at once, for a later rollback.

    Attributes:
        rows: Rows of its requests; -1 where the records are not needed any more.
        starts: Committed tokens of each row before it.
        offsets: First node of each request, and their number.
        inputs: Inputs of convolutions by place.
        records: Records of recurrences by place.
    """

    rows: list[int]
    starts: list[int]
    offsets: list[int]
    inputs: dict[int, Tensor]
    records: dict[int, Record]


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
        keeps_history: Whether passes that are committed at once leave records, so that rows can be rolled back.

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
        self.keeps_history = False
        self._history: list[AdvancedPass] = []
        self._saved: dict[int, Tensor] = {}
        self._bases = [0] * max_rows  # per row: the length at which its state was saved
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        size = max_rows * self.bytes_per_row(dtype)
        with fitting_into_memory(f"{max_rows} rows with recurrent states", size, device, "lower max_rows"):
            for place, shape in enumerate(shapes):
                if isinstance(shape, WindowShape):
                    window = (max_rows, shape.length, shape.channels)
                    self.windows[place] = torch.zeros(window, dtype=dtype, device=device)
                else:
                    state = (max_rows, shape.heads, shape.key_dim, shape.value_dim)
                    self.states[place] = torch.zeros(state, dtype=wide, device=device)

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

    # -- rollback, for models that draft ------------------------------------------------------------------------------

    def keep_history(self) -> None:
        """Keeps the records of passes that are committed at once, and a saved state per row, from now on."""
        if not self.keeps_history:
            self.keeps_history = True
            self._saved = {place: each.clone() for place, each in {**self.windows, **self.states}.items()}

    def end_advance(self, rows: Tensor, lengths: Tensor, offsets: Tensor) -> None:
        """Keeps the records of a pass that was committed at once. Without records its rows are saved.

        Args:
            rows: Row of each request, int32 [B].
            lengths: Committed tokens of each request before the pass, int32 [B].
            offsets: First node of each request, int32 [B + 1].
        """
        if not self.keeps_history:
            return
        owners, starts, ends = rows.tolist(), lengths.tolist(), offsets.tolist()
        if not self.inputs and not self.records:
            self._save(owners, [start + end - first for start, first, end in zip(starts, ends, ends[1:])])
            return
        self._history.append(AdvancedPass(owners, starts, ends, dict(self.inputs), dict(self.records)))
        self.begin()
        counts = [end - first for first, end in zip(ends, ends[1:])]
        grown = {row: start + count for row, start, count in zip(owners, starts, counts)}
        long = [row for row in owners if self._spans(row, grown[row], 4)]
        self._save(long, [grown[row] for row in long])

    def settle(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Saves rows with a long history at their present lengths, below which they will not be rolled back.

        Args:
            rows: B rows.
            lengths: Their present lengths.
        """
        long = {row: length for row, length in zip(rows, lengths) if self._spans(row, length, 1)}
        self._save(list(long), list(long.values()))

    def save_present(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Saves rows whose states were written from elsewhere, at their present lengths."""
        if self.keeps_history:
            self._save(rows, lengths)

    def earliest(self, row: int) -> int | None:
        """Returns the smallest length besides 0 to which a row can be rolled back, or None if none is known."""
        return self._bases[row] if self.keeps_history and self._bases[row] != _UNKNOWN else None

    def _spans(self, row: int, length: int, times: int) -> bool:
        """Whether more tokens than the longest history, or some times as many, are behind the saved state of a row."""
        return self.keeps_history and length - self._bases[row] > times * LONGEST_HISTORY

    def reaches(self, row: int, length: int) -> bool:
        """Returns whether a row can be rolled back to a length."""
        return length == 0 or (self.keeps_history and self._bases[row] <= length)

    def rollback(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives rows the states that they had at earlier lengths: saved states, and the records since then.

        Args:
            rows: B rows.
            lengths: Their lengths, which they reach.
        """
        wanted, first = dict(zip(rows, lengths)), 0
        paths: dict[int, list[int]] = {row: [] for row in rows}
        for each in self._history:
            for at, row in enumerate(each.rows):
                for node in range(each.offsets[at], each.offsets[at + 1]) if row in wanted else ():
                    if each.starts[at] + node - each.offsets[at] < wanted[row]:
                        paths[row].append(first + node)
            first += each.offsets[-1]
        device = next(iter(self._saved.values())).device
        places = host_to_device(rows, torch.int64, device)
        for place, saved in self._saved.items():
            (self.windows if place in self.windows else self.states)[place][places] = saved[places]
        width = max(map(len, paths.values()))
        if width:
            path = table_to_device(
                [[*path, *[-1] * (width - len(path))] for path in paths.values()], torch.int32, device
            )
            bases = host_to_device([self._bases[row] for row in rows], torch.int32, device)
            self._replay(places.to(torch.int32), bases, path)
        self._save(rows, lengths)

    def _replay(self, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
        """Commits a path over the nodes of all passes of the history."""
        for place, window in self.windows.items():
            window_commit(window, torch.cat([each.inputs[place] for each in self._history]), rows, lengths, path)
        for place, state in self.states.items():
            found = [each.records[place] for each in self._history]
            parts = [torch.cat(part) for part in zip(*((each.key, each.value, each.log_gate) for each in found))]
            state_commit(state, *parts, rows, lengths, path, found[0].decay)

    def _save(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Saves the present states of rows, and drops passes that no row needs any more."""
        if not rows:
            return
        self.forget(rows, [_UNKNOWN] * len(rows))  # first: an interruption leaves no wrong base
        places = host_to_device(rows, torch.int64, next(iter(self._saved.values())).device)
        for place, each in {**self.windows, **self.states}.items():
            self._saved[place][places] = each[places]
        self.forget(rows, lengths)

    def forget(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Drops the whole history of rows: what is behind it is saved, and what is in it was rolled back.

        Args:
            rows: B rows.
            lengths: Lengths at which their states are saved; 0 if nothing is.
        """
        gone = set(rows)
        for row, length in zip(rows, lengths):
            self._bases[row] = length
        for each in self._history:
            each.rows[:] = [-1 if row in gone else row for row in each.rows]
        self._history = [each for each in self._history if any(row >= 0 for row in each.rows)]

    def read(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """Returns copies of the committed windows and states of rows, by place."""
        return {place: each[list(rows)] for place, each in {**self.windows, **self.states}.items()}

    def write(self, rows: Sequence[int], values: Mapping[int, Tensor]) -> None:
        """Gives rows the windows and states that `read` returned."""
        for place, each in {**self.windows, **self.states}.items():
            each[list(rows)] = values[place]

    def fork(self, source: int, row: int) -> None:
        """Copies the committed states of one row to another."""
        for each in (*self.windows.values(), *self.states.values()):
            each[row] = each[source]

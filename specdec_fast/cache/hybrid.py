"""The cache of a model that mixes attention with recurrent layers. Tests: tests/cache/test_recurrent_states.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.recurrent_states import RecurrentStates
from specdec_fast.cache.shapes import LayerShape, StateShape, WindowShape
from specdec_fast.interfaces import Slots


class HybridCache(PagedCache):
    """Pages for attention layers, and one committed state per row for recurrent ones, behind the same verbs.

    A released row starts again from an empty state. Earlier states of a row are not kept, so rows are not truncated and
    prompts share no pages.

    Args:
        states: States of the recurrent layers.
        **options: Arguments of `PagedCache`.

    Attributes:
        recurrent: States of the recurrent layers.
    """

    why_no_rollback = "it has recurrent layers, whose earlier states are not kept"

    def __init__(self, states: RecurrentStates, **options: Any) -> None:
        super().__init__(**options)
        self.recurrent = states

    def commit(
        self,
        rows: Tensor,
        slots: Slots,
        path: Tensor,
        num_accepted: Tensor,
        chains: Sequence[int] | None = None,
    ) -> None:
        """Keeps the accepted path of each request: its keys and values, and the states after its last node.

        Args:
            rows: Row of each request, int32 [B].
            slots: The places of the staged nodes.
            path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].
            num_accepted: Accepted draft nodes of each request, int32 [B].
            chains: As for `PagedCache.commit`.
        """
        self.recurrent.commit(rows, slots.lengths, path)
        if self.keys:
            super().commit(rows, slots, path, num_accepted, chains)
        else:
            self.lengths.index_add_(0, rows.long(), torch.where(path[:, 0] < 0, 0, num_accepted + 1))

    def keep_history(self) -> None:
        """Makes rows able to drop their last tokens, as drafts need it."""
        self.recurrent.keep_history()

    def rollback_point(self, row: int, length: int) -> int:
        """Returns the length to which a row is rolled back if it should have `length` tokens: that, or 0."""
        return length if length == int(self.lengths[row]) or self.recurrent.reaches(row, length) else 0

    def rollback(self, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        """Truncates rows to absolute lengths, which are 0, their own, or those of tokens since the last rollback.

        Args:
            rows: B rows.
            lengths: Their lengths.

        Raises:
            ValueError: If a row cannot go back to its length.
        """
        known = list(zip([int(row) for row in rows], [int(each) for each in lengths], strict=True))
        for row, length in known:
            if length > int(self.lengths[row]) or self.rollback_point(row, length) != length:
                self._check_lengths("rollback", [row], [length])
        back = {row: length for row, length in known if length != int(self.lengths[row])}
        stay = {row: length for row, length in known if row not in back}
        self.recurrent.settle(list(stay), list(stay.values()))
        if back:
            rows, lengths = list(back), list(back.values())
            if self.recurrent.keeps_history:
                self.recurrent.rollback(rows, lengths)
            self._write_lengths(rows, lengths)

    @contextmanager
    def provisional(self, rows: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Drops at its end all tokens that were stored inside of the context. The states of the rows are copied.

        Args:
            rows: B rows.
            lengths: Their present lengths.
        """
        before = self.recurrent.read(rows)
        try:
            yield
        finally:
            self.recurrent.write(rows, before)
            self._write_lengths(rows, lengths)

    def release(self, rows: Sequence[int]) -> None:
        """Frees all pages of rows, and forgets their history. Calling it twice is harmless."""
        super().release(rows)
        self.recurrent.forget(rows, [0] * len(rows))

    def set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Accepts the present lengths of rows only. See `rollback`."""
        self._check_lengths("set_lengths", rows, lengths)

    def _check_lengths(self, verb: str, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        for row, length in zip([int(row) for row in rows], [int(each) for each in lengths], strict=True):
            held = int(self.lengths[row])
            if length != held:
                raise ValueError(
                    f"{verb}: got length {length} for row {row} of {held} tokens; expected {held}, since the states "
                    "of recurrent layers cannot go back; release the row and compute it again"
                )

    def fork(self, source: int, row: int, length: int) -> bool:
        """Makes an empty row share all tokens of another row. Its states are copied.

        Args:
            source: The row to read from.
            row: The empty row.
            length: Tokens to share: all of the source.

        Returns:
            False, without any change, if the pool has too few free pages.

        Raises:
            ValueError: If `row` holds pages, or if `length` is not that of the source.
        """
        self._check_lengths("fork", [source], [length])
        if not super().fork(source, row, length):
            return False
        self.recurrent.fork(source, row)
        return True


def make_cache(layers: Sequence[LayerShape], states: Sequence[WindowShape | StateShape], **options: Any) -> PagedCache:
    """Returns the cache of a model.

    Args:
        layers: Shapes of the layers with attention.
        states: Windows and states of recurrent layers.
        **options: Other arguments of `PagedCache`.

    Returns:
        A `HybridCache` if there are any states.

    Raises:
        ValueError: If it does not fit into memory.
    """
    if not states:
        return PagedCache(layers, **options)
    rest = {name: options[name] for name in ("max_rows", "dtype", "device")}
    return HybridCache(RecurrentStates(states, **rest), layers=layers, **options)

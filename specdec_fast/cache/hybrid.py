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

SHORTEST_PREFIX = 256
"""Tokens below which a prompt saves no states: the pass that ends at them would cost more than it can save."""
SNAPSHOT_DISTANCE = 1024
"""Tokens between saved states of a long prompt. Each takes the memory of a row's states."""


class HybridCache(PagedCache):
    """Pages for attention layers, and one committed state per row for recurrent ones, behind the same verbs.

    A released row starts again from an empty state. Earlier states of a row are not kept, so rows are truncated only by
    records of their last tokens (`keep_history`). Prompts share pages up to a place where a state was saved.

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
        self._snapshots: dict[int, dict[int, dict[int, Tensor]]] = {}  # by row and length, until its pages have names

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

        Raises:
            RuntimeError: If the states of a row were lost by an interruption, and it was not released since.
        """
        lost = self.unsettled.intersection(rows)
        if lost:
            raise RuntimeError(
                f"cache: got rows {sorted(lost)}, whose states were not written back; release them first"
            )
        before = self.recurrent.read(rows)
        self.unsettled.update(rows)
        try:
            yield
        finally:
            self.recurrent.write(rows, before)
            self._write_lengths(rows, lengths)
            self.unsettled.difference_update(rows)

    def release(self, rows: Sequence[int]) -> None:
        """Frees all pages of rows, and forgets their history. Calling it twice is harmless."""
        super().release(rows)
        for row in rows:
            self._snapshots.pop(row, None)
        self.recurrent.forget(rows, [0] * len(rows))

    def set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Accepts the present lengths of rows only. See `rollback`."""
        self._check_lengths("set_lengths", rows, lengths)

    def _check_lengths(self, verb: str, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        for row, length in zip([int(row) for row in rows], [int(each) for each in lengths], strict=True):
            held = int(self.lengths[row])
            if length != held:
                base = self.recurrent.earliest(row)
                known = str(held) if base is None else f"0, or {base} to {held}"
                raise ValueError(
                    f"{verb}: got length {length} for row {row} of {held} tokens; expected {known}, since the states "
                    "of recurrent layers cannot go back further; release the row and compute it again"
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
        self.recurrent.save_present([row], [length])
        return True

    # -- pages that rows share by their names -------------------------------------------------------------------------

    def snapshot_points(self, start: int, end: int, common: int = 0) -> list[int]:
        """Returns the lengths at which the states of a prompt are saved, so that other prompts can start there.

        They are its last full page, the end of what it has in common with an earlier prompt, and multiples of
        SNAPSHOT_DISTANCE.

        Args:
            start: Tokens of the row, which come from another prompt.
            end: Tokens of the row after its prefill.
            common: Tokens in full pages that it has in common with another prompt. A third one may begin with them.

        Returns:
            Lengths, ascending: as many as can be saved beside the states with which the row starts.
        """
        last = end // self.page_size * self.page_size
        if last - start < SHORTEST_PREFIX:
            return []
        step = self._snapshot_distance
        first = [common] if common - start >= SHORTEST_PREFIX and common < last else []
        wanted = [*first, last, *range(last - 1 - (last - 1) % step, start, -step)]
        return sorted(dict.fromkeys(wanted[: max(self._most_saved - (start > 0), 1)]))

    @property
    def _snapshot_distance(self) -> int:
        """SNAPSHOT_DISTANCE in whole pages."""
        return -(-SNAPSHOT_DISTANCE // self.page_size) * self.page_size

    @property
    def _most_saved(self) -> int:
        """States that are saved for other rows: one for each row, and two at least."""
        return max(self.max_rows, 2)

    def snapshot(self, row: int) -> None:
        """Copies the states of a row at its present length, which is a multiple of the page size.

        Copies of all prompts that are being read are as few as those that were named: those at multiples of
        SNAPSHOT_DISTANCE are dropped first. Without memory nothing is saved, and earlier copies are dropped.
        """
        kept = self._snapshots.setdefault(row, {})
        while sum(map(len, self._snapshots.values())) >= self._most_saved:
            fullest = max(self._snapshots.values(), key=len)
            del fullest[min(fullest, key=lambda length: (length % self._snapshot_distance > 0, length))]
        try:
            kept[int(self.lengths[row])] = self.recurrent.read([row])
        except torch.OutOfMemoryError:  # nothing depends on it
            self.drop_snapshots()

    def drop_snapshots(self) -> None:
        """Drops all states that were saved for other rows."""
        self._snapshots.clear()
        self.pages.drop_snapshots()

    def name_pages(self, row: int, names: Sequence[bytes], states: Sequence[Any] = ()) -> None:
        """Names the first pages of a row up to the last one at whose end its states were copied.

        Args:
            row: The row. All tokens of these pages are committed.
            names: Names of the first pages (`PageNames.upto`).
            states: For each page, what else is kept with its name (`PageAllocator.states`).
        """
        counts = {length // self.page_size: copied for length, copied in self._snapshots.pop(row, {}).items()}
        last = max((count for count in counts if count <= len(names)), default=0)
        common = len(self.pages.find(names[:last]))
        super().name_pages(row, names[:last], states)
        for count in sorted(counts, key=lambda count: (count == common, count)):  # what others share is dropped last
            if count <= last:
                self.pages.keep_snapshot(names[count - 1], counts[count], self._most_saved)

    def find_pages(self, names: Sequence[bytes], *, with_states: bool = False) -> list[int]:
        """Returns the named pages with which a row can start: those up to the last one with saved states."""
        return self.pages.upto_snapshot(super().find_pages(names, with_states=with_states))

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Makes a row without tokens start with the tokens of named pages and the states behind them.

        Args:
            row: The row. It holds no tokens, but may have reserved pages.
            pages: Named pages (`find_pages`).
        """
        if pages:
            self.recurrent.write([row], self.pages.snapshot(pages[-1]))
            super().adopt(row, pages)
            self.recurrent.save_present([row], [len(pages) * self.page_size])


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

"""The paged key/value cache: the only writer of its tensors, page tables and lengths.

Knows nothing of models beyond the shape of a layer's keys and values. Between steps `lengths[row]` committed tokens
of a row lie at positions 0..lengths-1; staged nodes lie behind them and vanish unless committed.
Tests: tests/cache/test_paged.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec_fast.cache.pages import PageAllocator
from specdec_fast.core.device_transfer import upload_values, write_entries
from specdec_fast.interfaces import Slots
from specdec_kernels import CacheTable, TreePlan, kv_commit, kv_slots


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value shape of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class PagedCache:
    """Keys and values of all layers in pages of `page_size` tokens, [num_pages, page_size, heads, dim] each.

    max_rows and max_length are capacities: the page table is int32 [max_rows, ceil(max_length / page_size)].
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= page_size <= 256:
            raise ValueError(f"page_size: got {page_size}; expected 1..256")
        self.page_size = page_size
        self.max_rows = max_rows
        self.max_length = max_length
        self.pages = PageAllocator(num_pages)
        self.device = torch.device(device)

        def pool(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_pages, page_size, heads, dim, dtype=dtype, device=device)

        self.keys = [pool(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [pool(layer.num_kv_heads, layer.value_dim) for layer in layers]
        self._all = CacheTable([*self.keys, *self.values])
        self.page_table = torch.zeros(max_rows, -(-max_length // page_size), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # the same memory; numpy's own items are slower whenever a pass has emptied the processor's caches
        on_host = self.device.type == "cpu"
        self._lengths_here: memoryview | None = memoryview(self.lengths.numpy().data) if on_host else None
        self._owned: list[list[int]] = [[] for _ in range(max_rows)]
        self._owner: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy's lengths lie elsewhere, and nobody owns it."""
        return {**self.__dict__, "_lengths_here": None, "_owner": None}

    def claim(self, owner: object, rows: Collection[int] = ()) -> None:
        """From now on `owner` alone uses this cache, and holds pages in `rows` alone: what lies in others was left by
        an owner that is gone, or by a release that was broken off, and is given back.

        Raises ValueError while somebody else holds pages: another owner that is alive, or one that never claimed.
        """
        if self._owner is None or self._owner() is not owner:
            if any(self._owned) and not self._is_abandoned():
                raise ValueError(
                    "target: got one in which somebody else holds pages; expected one engine at a time: finish or "
                    "cancel what another engine, drafter or loop runs on it, drop it, or give each a target of its own"
                )
            self._owner = weakref.ref(owner)
        self.release([row for row, pages in enumerate(self._owned) if pages and row not in rows])
        if self.pages.num_used and not any(self._owned):
            self.pages.reset()

    def _is_abandoned(self) -> bool:
        """Whether there was an owner, and it is gone."""
        if self._owner is not None and self._owner() is not None:
            gc.collect()  # an exception that was caught may keep the frames of an engine that was dropped
        return self._owner is not None and self._owner() is None

    def pages_for(self, length: int) -> int:
        """Pages that `length` tokens of a row occupy."""
        return -(-length // self.page_size)

    def reserve(self, row: int, length: int) -> bool:
        """Make room for `length` tokens of a row; False (and nothing changed) when the pool is dry."""
        if length > self.max_length:
            raise ValueError(f"reserve: got length {length} for row {row}; expected at most {self.max_length}")
        owned = self._owned[row]
        missing = self.pages_for(length) - len(owned)
        if missing <= 0:
            return True
        taken = self.pages.take(missing)
        if taken is None:
            return False
        start = len(owned)
        try:
            upload_values(taken, self.page_table[row, start : start + missing])
        except BaseException:
            self.pages.give_back(taken)
            raise
        owned.extend(taken)  # last: who owns a page reads it through the table
        return True

    def stage(
        self, rows: Tensor, offsets: Tensor, num_nodes: int, plan: TreePlan | None = None, *, advance: bool = False
    ) -> Slots:
        """Where `num_nodes` packed nodes go: node i of row b at slot `lengths[b] + i`.

        rows: int32 [B]; offsets: int32 [B+1]; plan gives depths and ancestors of trees, None means causal chains.
        The caller has reserved the room. Nodes behind offsets[-1] go to the trash page. With `advance` they are
        committed where they lie (known tokens: prefill, and every token a draft model feeds itself).
        """
        depth, ancestors = (None, None) if plan is None else (plan.depth, plan.ancestors)
        table, lengths, slots, positions = kv_slots(
            self.page_table, self.lengths, rows, offsets, depth, num_nodes, self.page_size, advance
        )
        return Slots(table, lengths, offsets, slots, positions, ancestors, depth)

    def commit(
        self,
        rows: Tensor,
        slots: Slots,
        path: Tensor,
        num_accepted: Tensor,
        chains: Sequence[int] | None = None,
    ) -> None:
        """Keep the accepted path of a step (root first), forget the other nodes; lengths grow by the path's.

        chains: the rows as host integers, where all of them are chains and the host may read now: these lie where they
        are kept, so that on a CPU only lengths change.
        """
        if chains is not None and self._lengths_here is not None:
            staged = [end - start for start, end in pairwise(slots.offsets.tolist())]
            for row, count, accepted in zip(chains, staged, num_accepted.tolist(), strict=True):
                self._lengths_here[row] += min(accepted + 1, count)
            return
        kv_commit(self._all, slots.page_table, slots.lengths, path, slots.offsets, num_accepted, rows, self.lengths)

    def rollback(self, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None:
        """Truncate rows to absolute lengths: both int32 [B], or both of the host."""
        if isinstance(rows, Tensor) or isinstance(lengths, Tensor):
            self.lengths[rows] = lengths  # type: ignore[assignment]
        elif self._lengths_here is not None:  # every step of a draft model: no operator
            for row, length in zip(rows, lengths, strict=True):
                self._lengths_here[row] = length
        else:
            write_entries(rows, lengths, self.lengths)

    def fork(self, source: int, row: int, length: int) -> bool:
        """Let an empty row read the first `length` tokens of another: whole pages shared, the last one copied.

        False (and nothing changed) when the pool is dry. While both rows live, neither may be rolled back into pages
        that they share: what is staged there next would be written for both.
        """
        if self._owned[row]:
            raise ValueError(f"fork: row {row} already holds pages; release it first")
        shared = self._owned[source][: length // self.page_size]
        rest = length % self.page_size
        copied = self.pages.take(1) if rest else []
        if copied is None:
            return False
        self.pages.share(shared)
        owned = [*shared, *copied]
        try:
            if rest:
                origin = self._owned[source][len(shared)]
                for pool in self._all:
                    pool[copied[0], :rest] = pool[origin, :rest]
            if owned:
                upload_values(owned, self.page_table[row, : len(owned)])
        except BaseException:
            self.pages.give_back(owned)
            raise
        self.lengths[row] = length
        self._owned[row] = owned
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Give back all pages of the rows. Idempotent."""
        for row in rows:
            self.lengths[row] = 0
            owned, self._owned[row] = self._owned[row], []
            if owned:
                self.page_table[row].zero_()
                self.pages.give_back(owned)  # last: broken off before, it loses pages, and nobody reads a wrong one

    def read(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's committed keys and values, [length, heads, dim]: for tests and for recompute checks."""
        length = int(self.lengths[row])
        at = torch.arange(length, device=self.device)
        pages = self.page_table[row][at // self.page_size].long()
        return self.keys[layer][pages, at % self.page_size], self.values[layer][pages, at % self.page_size]

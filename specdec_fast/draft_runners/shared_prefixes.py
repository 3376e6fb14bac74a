"""Prefix sharing of draft models: rows whose texts begin alike share pages of the draft's cache.

The engine shares pages of the target's cache in the same way (specdec_fast/engine/prefix_sharing.py), but not at the
same time: a draft model stores a prompt when it first drafts for it.

Tests: tests/draft_runners/test_shared_prefixes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec_fast.cache.prefix import PageNames
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.interfaces import StateView


class SharedPrefixes:
    """The pages that the rows of a draft model share.

    Only texts that never change behind their end can take part, so none in another tokenizer.

    Args:
        model: The draft model, a target of its own.
        embed: Replaces tokens that the model cannot embed.
    """

    def __init__(self, model: Any, embed: Callable[[Sequence[int]], list[int]]) -> None:
        self._model, self._embed = model, embed
        self._names: dict[int, PageNames] = {}
        self._named: dict[int, int] = {}  # pages of each row that have names
        self._new: set[int] = set()  # rows that have stored nothing yet

    def begin(self, view: StateView, rows: Sequence[int]) -> None:
        """Adds rows, with nothing stored. Rows that share with none are left out."""
        cache, has_changed = self._model.cache, getattr(self._model, "has_changed_weights", None)
        if not self._names and has_changed is not None and has_changed():
            cache.pages.forget()
        kind_of = getattr(self._model, "prefix_kind", None)
        cache.release(rows)  # an interrupted release may have left pages with names, to which a new text must not write
        for row in rows:
            salt = view.cache_salt(row)
            if salt is not None:
                kind = "" if kind_of is None else kind_of(view.longest(row))
                self._names[row], self._named[row] = cache.page_names(salt, kind), 0
                self._new.add(row)

    def release(self, row: int) -> None:
        """Removes a row. Its pages keep their names."""
        self._new.discard(row)
        self._names.pop(row, None)
        self._named.pop(row, None)

    def store(self, rows: Sequence[int], texts: Sequence[Sequence[int]], note: Callable[[int, int], None]) -> None:
        """Makes new rows start with pages that other rows have stored.

        If several new rows begin alike, the first one is stored before the others share its pages.

        Args:
            rows: Rows that draft now. Their pages are reserved.
            texts: Their committed texts. All tokens but the root may be shared.
            note: Called with a row and the number of its tokens that are stored, whenever that changes.

        Raises:
            RuntimeError: If an earlier failure lost the pages of a row, and there are no others.
        """
        waiting: list[tuple[int, Sequence[int], int]] = []  # row, text, stored tokens
        pending: set[bytes] = set()  # names of the pages that these rows will store
        cache = self._model.cache
        for row, text in zip(rows, texts) if self._new else ():
            if row not in self._new:
                continue
            names = self._names[row].upto(text, len(text) - 1)
            pages = cache.find_pages(names)
            if len(pages) < len(names) and names[len(pages)] in pending:
                self._extend(waiting, note)
                waiting, pages = [], cache.find_pages(names)
                pending.clear()
            if not cache.reserve(row, len(text)):  # a failure of `adopt` gives them back
                raise RuntimeError(f"draft model: the pages of row {row} were lost after a failure")
            cache.adopt(row, pages)
            stored = len(pages) * cache.page_size
            note(row, stored)
            self._new.discard(row)
            self._named[row] = len(pages)
            waiting.append((row, text, stored))
            pending.update(names[len(pages) :])

    def name_pages(self, row: int, text: Sequence[int]) -> None:
        """Names the full pages of a row whose committed tokens but the root are stored."""
        count = (len(text) - 1) // self._model.cache.page_size
        if row in self._names and count > self._named[row]:
            self._model.cache.name_pages(row, self._names[row].upto(text, len(text) - 1))
            self._named[row] = count

    def _extend(self, waiting: list[tuple[int, Sequence[int], int]], note: Callable[[int, int], None]) -> None:
        """Stores texts without their roots."""
        left = [(row, text, stored) for row, text, stored in waiting if stored < len(text) - 1]
        if left:
            counts = tuple(len(text) - 1 - stored for _, text, stored in left)
            shape = chain_layout(tuple(row for row, *_ in left), counts, self._model.device)
            fed = [token for _, text, stored in left for token in self._embed(text[stored:-1])]
            tokens = host_to_device(fed, torch.int64, self._model.device)
            self._model.extend(shape.rows, tokens, shape.offsets, logits=False)
        for row, text, _ in waiting:
            note(row, len(text) - 1)
            self.name_pages(row, text)

"""Checks that named pages have the contents of their names, over the automaton, whose keys depend on whole prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec_fast.cache import PagedCache, PageNames

Texts = dict[bytes, tuple[int, ...]]


def record_names(patch: pytest.MonkeyPatch) -> Texts:
    """Records for every name that is made from now on the text up to the end of its page."""
    texts: Texts = {}
    upto = PageNames.upto

    def recorded(self: PageNames, tokens: Sequence[int], length: int) -> list[bytes]:
        found = upto(self, tokens, length)
        size = self._page_size
        texts.update((name, tuple(tokens[: (at + 1) * size])) for at, name in enumerate(found))
        return found

    patch.setattr(PageNames, "upto", recorded)
    return texts


def check_named_pages(cache: PagedCache, texts: Texts, transitions: list[list[int]], *, counts: bool = True) -> int:
    """Compares the keys of every named page with the states of the automaton; returns the number of pages.

    counts: Compare the number of pages in use as well. An interruption at the wrong place loses pages for a while.
    """
    pages = cache.pages
    for name, page in pages._page_of.items():
        state, want = 0, []
        for token in texts[name]:
            state = transitions[state][token]
            want.append(state)
        assert cache.keys[0][page].flatten().tolist() == want[-cache.page_size :], f"page {page}"
    if not counts:
        return len(pages._page_of)
    owned = {page for each in cache._owned for page in each}
    assert pages.num_used == len(owned) and not set(pages._free) & set(pages._name_of)
    return len(pages._page_of)

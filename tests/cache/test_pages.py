"""PageAllocator: no page is allocated twice, and none is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specdec_fast.cache import PageAllocator


def test_page_zero_is_never_allocated() -> None:
    pages = PageAllocator(8)
    allocated = pages.allocate(7)
    assert allocated is not None and sorted(allocated) == list(range(1, 8))
    assert pages.num_free == 0 and pages.num_used == 7


def test_taking_too_many_takes_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(4) is None and pages.num_free == 3
    assert pages.allocate(0) == []


def test_shared_pages_live_until_their_last_owner() -> None:
    pages = PageAllocator(4)
    allocated = pages.allocate(2)
    assert allocated is not None
    pages.share(allocated)
    pages.free(allocated)
    assert pages.num_free == 1
    pages.free(allocated)
    assert pages.num_free == 3


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="num_pages: got 1; expected at least 2"):
        PageAllocator(1)
    pages = PageAllocator(4)
    allocated = pages.allocate(1)
    assert allocated is not None
    pages.free(allocated)
    with pytest.raises(ValueError, match=f"page {allocated[0]} is not in use"):
        pages.free(allocated)
    with pytest.raises(ValueError, match=f"page {allocated[0]} is free"):
        pages.share(allocated)


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_against_a_counter(seed: int) -> None:
    source, pages = random.Random(seed), PageAllocator(20)
    owners: Counter[int] = Counter()
    for _ in range(500):
        held = sorted(owners.elements())
        action = source.random()
        if action < 0.45:
            wanted = source.randrange(6)
            allocated = pages.allocate(wanted)
            assert (allocated is None) == (wanted > 19 - len(owners))
            for page in allocated or []:
                assert page not in owners and 1 <= page < 20
                owners[page] += 1
        elif held:
            some = source.sample(held, source.randrange(1, len(held) + 1)) if action < 0.8 else held[:2]
            some = sorted(set(some))
            if action < 0.6:
                pages.share(some)
                owners.update(some)
            else:
                pages.free(some)
                owners.subtract(some)
                owners = +owners
        assert pages.num_used == len(owners) and pages.num_free == 19 - len(owners)

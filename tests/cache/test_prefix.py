"""Names of pages, pages that keep their contents without owners, and rows that adopt them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles.ledger import LAYERS, Ledger, cache

from specdec_fast.cache import PageAllocator, PagedCache, PageNames, paged
from specdec_kernels import kv_stage

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def names(text: list[int], size: int = 4, salt: str = "") -> list[bytes]:
    return PageNames(size, salt).upto(text, len(text))


def test_only_full_pages_have_names() -> None:
    assert [len(names(TEXT[:length])) for length in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert len(PageNames(4).upto(TEXT, 7)) == 1, "a text may be longer than what is stored of it"


def test_a_name_depends_on_all_tokens_before_it() -> None:
    """The second page has the same tokens in all texts."""
    texts = [[0, 0, 0, at, *TEXT[4:8]] for at in (0, 1, 2**31, 2**40, -1)]
    assert len({names(text)[1] for text in texts}) == len(texts)
    assert names(TEXT)[0] == names([*TEXT[:4], 7, 7])[0]
    assert names([1, 2, 3, 4] * 2)[0] != names([1, 2, 3, 4] * 2)[1]


def test_salts_and_page_sizes_separate_names() -> None:
    found = [set(names(TEXT, size, salt)) for size in (1, 2, 4) for salt in ("", "a", "b", "\ud800")]
    assert sum(map(len, found)) == len(set().union(*found))


@pytest.mark.parametrize("seed", range(5))
def test_a_text_that_grows_keeps_its_names(seed: int) -> None:
    source = random.Random(seed)
    text = [source.randrange(5) for _ in range(60)]
    growing, length = PageNames(4), 0
    while length < 60:
        length = min(length + source.randrange(9), 60)
        assert growing.upto(text[:length], length) == names(text[:length])
    assert growing.upto(text, 20) == names(text)[:5], "a shorter length has the first names"


def in_use(pages: PageAllocator, count: int) -> list[int]:
    found = pages.allocate(count)
    assert found is not None
    return found


def test_a_named_page_stays_until_all_others_are_taken() -> None:
    pages = PageAllocator(5)
    first, second = in_use(pages, 2)
    pages.name(first, b"first")
    pages.free([first, second])
    assert pages.num_free == 4 and pages.num_used == 0 and pages.find([b"first"]) == [first]
    assert first not in in_use(pages, 3) and pages.num_evictions == 0
    assert pages.find([b"first"]) == [first] and pages.num_free == 1
    assert in_use(pages, 1) == [first] and pages.num_evictions == 1
    assert pages.find([b"first"]) == [] and pages.num_named == 0


def test_the_oldest_use_is_evicted_first() -> None:
    pages = PageAllocator(5)
    held = in_use(pages, 4)
    for page in held:
        pages.name(page, b"%d" % page)
    for page in held:
        pages.free([page])
    pages.share(held[:1])  # used again
    pages.free(held[:1])
    assert [in_use(pages, 1)[0] for _ in held] == [*held[1:], held[0]]


def test_a_page_can_be_shared_by_its_name_after_its_last_owner() -> None:
    pages = PageAllocator(3)
    named, other = in_use(pages, 2)
    pages.name(named, b"name")
    pages.free([named, other])
    pages.share([named])
    assert pages.num_used == 1 and pages.allocate(2) is None
    with pytest.raises(ValueError, match=f"page {other} is free"):
        pages.share([other])


def test_the_first_page_with_a_name_keeps_it() -> None:
    pages = PageAllocator(4)
    first, second = in_use(pages, 2)
    pages.name(first, b"name")
    pages.name(second, b"name")
    pages.name(first, b"another")
    assert pages.find([b"name"]) == [first] and pages.find([b"another"]) == [] and pages.num_named == 1


def test_a_chain_ends_at_the_first_missing_name() -> None:
    pages = PageAllocator(5)
    held = in_use(pages, 3)
    for page, name in zip(held, (b"0", b"1", b"3")):
        pages.name(page, name, None if name == b"1" else name)
    assert pages.find([b"0", b"1", b"2", b"3"]) == held[:2]
    assert pages.find([b"0", b"1"], with_states=True) == held[:1] and pages.states(b"0") == b"0"


def test_states_leave_with_their_name() -> None:
    pages = PageAllocator(2)
    (page,) = in_use(pages, 1)
    pages.name(page, b"name", [1])
    pages.free([page])
    in_use(pages, 1)
    with pytest.raises(KeyError):
        pages.states(b"name")


def test_forgotten_names_give_all_pages_back() -> None:
    pages = PageAllocator(6)
    held = in_use(pages, 4)
    for page in held:
        pages.name(page, b"%d" % page, page)
    pages.free(held[:2])
    pages.forget()
    assert pages.num_named == 0 and pages.num_free == 3 and pages.find([b"1"]) == []
    pages.free(held[2:])
    assert sorted(in_use(pages, 5)) == [1, 2, 3, 4, 5]


# -- rows


def stored(made: PagedCache, row: int, text: list[int]) -> list[bytes]:
    """Stores a text whose keys are its tokens, and names its full pages."""
    assert made.reserve(row, len(text))
    write(made, row, text)
    found = made.page_names().upto(text, len(text))
    made.name_pages(row, found)
    return found


def write(made: PagedCache, row: int, tokens: list[int]) -> None:
    slots = made.stage(
        torch.tensor([row], dtype=torch.int32),
        torch.tensor([0, len(tokens)], dtype=torch.int32),
        len(tokens),
        advance=True,
    )
    for layer, shape in enumerate(LAYERS):
        value = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
        kv_stage(
            value.repeat(1, shape.num_kv_heads, shape.key_dim),
            value.repeat(1, shape.num_kv_heads, shape.value_dim),
            made.keys[layer],
            made.values[layer],
            slots.slots,
        )


def contents(made: PagedCache, row: int) -> list[int]:
    found = [made.read(row, layer)[0][:, 0, 0].tolist() for layer in range(len(LAYERS))]
    assert found[0] == found[1]
    return [int(each) for each in found[0]]


@pytest.mark.parametrize("reserved", [0, 3, 16])
def test_a_row_adopts_pages_in_place_of_its_own(reserved: int) -> None:
    made = cache(num_pages=20)
    found = stored(made, 0, TEXT)
    made.release([0])
    assert made.pages.num_used == 0
    assert made.reserve(3, reserved) if reserved else True
    pages = made.pages.find(found)
    assert len(pages) == 2
    made.adopt(3, pages)
    assert contents(made, 3) == TEXT[:8] and made.pages.num_hits == 2
    assert made.reserve(3, 16)
    write(made, 3, [7] * 8)
    assert contents(made, 3) == [*TEXT[:8], *[7] * 8]
    assert made.pages.num_used == 4
    made.release([3])
    assert made.pages.num_used == 0 and made.pages.find(found) == pages


def test_rows_that_share_pages_do_not_see_each_others_tokens() -> None:
    made = cache(num_pages=20)
    found = stored(made, 0, TEXT)
    for row, token in ((1, 11), (2, 22)):
        made.adopt(row, made.pages.find(found))
        assert made.reserve(row, 16)
        write(made, row, [token] * 8)
    assert [contents(made, row) for row in (0, 1, 2)] == [TEXT, [*TEXT[:8], *[11] * 8], [*TEXT[:8], *[22] * 8]]
    made.release([0])
    assert contents(made, 1)[:8] == TEXT[:8]


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    made = cache(num_pages=4, max_length=12)
    found = stored(made, 0, [*TEXT, 1, 2])
    made.release([0])
    assert made.reserve(1, 4) and len(made.pages.find(found)) == 2
    assert made.reserve(1, 8) and len(made.pages.find(found)) == 1


def test_pages_that_a_row_adopts_are_not_free_for_it() -> None:
    made = cache(num_pages=4, max_length=12)
    pages = made.pages.find(stored(made, 0, TEXT))
    made.release([0])
    assert len(pages) == 2 and made.pages.num_free == 3
    assert made.has_pages_for(12, pages) and not made.has_pages_for(13, pages)
    assert made.has_pages_for(12, []) and not made.has_pages_for(13, [])
    made.adopt(1, pages)
    assert made.has_pages_for(12, pages), "pages in use cost nothing more"
    assert not made.has_pages_for(12, pages[:1])


def test_a_new_owner_finds_no_names() -> None:
    class Owner:
        pass

    made, first, second = cache(), Owner(), Owner()
    made.claim(first)
    found = stored(made, 0, TEXT)
    made.release([0])
    made.claim(first)
    assert len(made.pages.find(found)) == 2
    made.claim(second)
    assert made.pages.find(found) == [] and made.pages.num_free == 39


@pytest.mark.parametrize("reserved", [0, 12])
def test_a_row_that_could_not_adopt_writes_to_no_shared_page(reserved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache()
    found = stored(made, 0, TEXT)
    pages, used = made.pages.find(found), made.pages.num_used
    assert made.reserve(1, reserved) if reserved else True
    upload = paged.upload_values

    def broken(*arguments: Any) -> None:
        upload(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(paged, "upload_values", broken)
        with pytest.raises(MemoryError):
            made.adopt(1, pages)
    assert made.pages.num_used == used and not made.page_table[1].any() and int(made.lengths[1]) == 0
    assert made.reserve(1, 8)
    write(made, 1, [9] * 8)
    assert contents(made, 0) == TEXT


def test_the_ledger_is_untouched_by_names() -> None:
    """Names change no contents: a ledger of rows with trees agrees before and after."""
    ledger = Ledger(cache())
    assert ledger.cache.reserve(0, 12)
    ledger.rows[0] = []
    ledger.step({0: [-1, 0, 0, 1, 3, 4, 5, 6]}, {0: [0, 1, 3, 4, 5, 6]})
    ledger.cache.name_pages(0, names([1] * 6))
    ledger.check()


def test_kinds_and_salts_cannot_stand_for_each_other() -> None:
    """A client chooses its salt, and so must not be able to choose the kind of its keys."""
    text = list(range(8))
    pairs = [("", "long"), ("\0long", ""), ("long", ""), ("\0", "long"), ("g", "lon"), ("", "")]
    names = [PageNames(4, salt, kind).upto(text, 8)[0] for salt, kind in pairs]
    assert len(set(names)) == len(names)

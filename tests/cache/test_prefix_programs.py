"""Random programs of rows that share pages, against a model of lists that compares whole texts in place of names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.ledger import LAYERS, cache

from specdec_fast.cache import PageNames
from specdec_kernels import kv_stage

ROWS = st.integers(0, 4)
TOKENS = st.lists(st.integers(0, 1), max_size=3)
BOOKS = ([0] * 12, [0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0])  # texts begin like one of them, so often like each other


@dataclass(eq=False)
class Page:
    """A page of the model: the text up to its end if it has a name, and how many rows own it."""

    text: tuple[int, ...] | None = None
    owners: int = 0


@dataclass
class SlowPool:
    """The pool of pages as lists. `unowned`: pages with a text and no owner, the oldest use first."""

    left: int
    named: list[Page] = field(default_factory=list)
    unowned: list[Page] = field(default_factory=list)
    evictions: int = 0

    def take(self, count: int) -> list[Page] | None:
        if count > self.left + len(self.unowned):
            return None
        for _ in range(count):
            if self.left:
                self.left -= 1
            else:
                self.named.remove(self.unowned.pop(0))
                self.evictions += 1
        return [Page(owners=1) for _ in range(count)]

    def longest(self, text: list[int], size: int) -> list[Page]:
        found: list[Page] = []
        while True:
            part = tuple(text[: (len(found) + 1) * size])
            own = [page for page in self.named if page.text == part]
            if len(part) % size or len(part) != (len(found) + 1) * size or not own:
                return found
            found += own

    def share(self, pages: list[Page]) -> None:
        for page in pages:
            page.owners += 1
            if page in self.unowned:
                self.unowned.remove(page)

    def give_back(self, pages: list[Page]) -> None:
        for page in pages:
            page.owners -= 1
            if not page.owners:
                if page in self.named:
                    self.unowned.append(page)
                else:
                    self.left += 1


@dataclass
class Row:
    text: list[int]
    names: PageNames
    pages: list[Page]


class PrefixPrograms(RuleBasedStateMachine):
    """Admit, decode with rejected nodes, name, release, forget, in a pool that runs dry."""

    @initialize(size=st.sampled_from([1, 2, 3]), pages=st.integers(4, 14))
    def start(self, size: int, pages: int) -> None:
        self.size = size
        self.cache = cache(page_size=size, num_pages=pages, max_length=48)
        self.pool, self.rows = SlowPool(pages - 1), {}
        self.contents: dict[tuple[int, ...], int] = {}
        self.texts: dict[bytes, tuple[int, ...]] = {}

    def number(self, text: tuple[int, ...]) -> int:
        """The key of the last token of a text: a number of its own for every text."""
        return self.contents.setdefault(text, len(self.contents) + 1)

    def write(self, row: int, numbers: list[int], advance: bool) -> None:
        slots = self.cache.stage(
            torch.tensor([row], dtype=torch.int32),
            torch.tensor([0, len(numbers)], dtype=torch.int32),
            len(numbers),
            advance=advance,
        )
        for layer, shape in enumerate(LAYERS):
            value = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
            keys, values = (
                value.repeat(1, shape.num_kv_heads, shape.key_dim),
                value.repeat(1, shape.num_kv_heads, shape.value_dim),
            )
            kv_stage(keys, values, self.cache.keys[layer], self.cache.values[layer], slots.slots)

    def store(self, row: int, tokens: list[int]) -> None:
        held = self.rows[row].text
        if tokens:
            self.write(row, [self.number((*held, *tokens[: at + 1])) for at in range(len(tokens))], True)
            held += tokens

    @precondition(lambda self: len(getattr(self, "rows", range(5))) < 5)
    @rule(
        book=st.sampled_from(BOOKS),
        part=st.integers(4, 12),
        tokens=TOKENS,
        more=st.integers(0, 3),
        reserved=st.booleans(),
    )
    def admit(self, book: list[int], part: int, tokens: list[int], more: int, reserved: bool) -> None:
        """A text joins, as one of an engine, or as one of a draft model, whose pages are reserved before."""
        row, text = next(row for row in range(5) if row not in self.rows), [*book[:part], *tokens]
        count = -(-(len(text) + more) // self.size)
        own: list[Page] = []
        if reserved:
            taken = self.pool.take(count)
            assert self.cache.reserve(row, len(text) + more) == (taken is not None)
            if taken is None:
                return
            own = taken
        names = self.cache.page_names()
        found = names.upto(text, len(text))
        self.texts.update(zip(found, (tuple(text[: (at + 1) * self.size]) for at in range(len(found)))))
        pages, want = self.cache.pages.find(found), self.pool.longest(text, self.size)
        assert len(pages) == len(want)
        if not reserved:
            fits = count - len(want) <= self.pool.left + sum(page not in want for page in self.pool.unowned)
            assert self.cache.has_pages_for(len(text) + more, pages) == fits
            if not fits:
                return
        self.cache.adopt(row, pages)
        self.pool.share(want)
        self.pool.give_back(own[: len(want)])
        rest = own[len(want) :] if reserved else self.pool.take(count - len(want))
        assert rest is not None and self.cache.reserve(row, len(text) + more)
        self.rows[row] = Row(text[: len(pages) * self.size], names, [*want, *rest])
        self.store(row, text[len(pages) * self.size :])

    @precondition(lambda self: getattr(self, "rows", None))
    @rule(pick=ROWS, tokens=TOKENS, rejected=st.integers(0, 4))
    def decode(self, pick: int, tokens: list[int], rejected: int) -> None:
        """A row grows, and rejected nodes are written behind it."""
        row = sorted(self.rows)[pick % len(self.rows)]
        own = self.rows[row]
        length = len(own.text) + len(tokens) + rejected
        if length > 48:
            return
        fresh = self.pool.take(max(-(-length // self.size) - len(own.pages), 0))
        assert self.cache.reserve(row, length) == (fresh is not None)
        if fresh is not None:
            own.pages += fresh
            self.store(row, tokens)
            if rejected:
                self.write(row, [-1] * rejected, False)

    @precondition(lambda self: getattr(self, "rows", None))
    @rule(pick=ROWS)
    def name(self, pick: int) -> None:
        row = sorted(self.rows)[pick % len(self.rows)]
        own = self.rows[row]
        names = own.names.upto(own.text, len(own.text))
        self.cache.name_pages(row, names)
        for at, page in enumerate(own.pages[: len(own.text) // self.size]):
            text = tuple(own.text[: (at + 1) * self.size])
            self.texts[names[at]] = text
            if page.text is None and all(each.text != text for each in self.pool.named):
                page.text = text
                self.pool.named.append(page)

    @precondition(lambda self: getattr(self, "rows", None))
    @rule(pick=ROWS, named=st.sampled_from([True, True, False]))
    def release(self, pick: int, named: bool) -> None:
        row = sorted(self.rows)[pick % len(self.rows)]
        if named:
            self.name(pick)
        self.cache.release([row])
        self.pool.give_back(list(reversed(self.rows.pop(row).pages)))

    @rule(really=st.integers(0, 9))
    def forget(self, really: int) -> None:
        if really == 0:
            self.cache.pages.forget()
            self.pool.left += len(self.pool.unowned)
            for page in self.pool.named:
                page.text = None
            self.pool.named, self.pool.unowned = [], []

    @invariant()
    def rows_have_their_own_texts(self) -> None:
        for row, own in getattr(self, "rows", {}).items():
            want = [self.number(tuple(own.text[: at + 1])) for at in range(len(own.text))]
            for layer in range(len(LAYERS)):
                for found in self.cache.read(row, layer):
                    assert found.flatten(1)[:, 0].tolist() == want

    @invariant()
    def named_pages_have_the_contents_of_their_names(self) -> None:
        if not hasattr(self, "cache"):
            return
        pages = self.cache.pages
        assert pages.num_named == len(self.pool.named)
        for name, page in pages._page_of.items():
            text = self.texts[name]
            want = [self.number(text[: at + 1]) for at in range(len(text) - self.size, len(text))]
            assert self.cache.keys[0][page, :, 0, 0].tolist() == want

    @invariant()
    def every_page_is_free_or_owned(self) -> None:
        if not hasattr(self, "cache"):
            return
        pages, owned = self.cache.pages, {page for each in self.cache._owned for page in each}
        free, unowned = set(pages._free), set(pages._unowned)
        assert len(free) + len(unowned) + len(owned) == pages.num_pages - 1 == len(free | unowned | owned)
        assert (len(free), len(unowned)) == (self.pool.left, len(self.pool.unowned))
        assert pages.num_used == len(owned) and pages.num_evictions == self.pool.evictions
        assert not free & set(pages._name_of)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.release(range(5))
            assert self.cache.pages.num_used == 0


TestPrefixPrograms = PrefixPrograms.TestCase
TestPrefixPrograms.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)

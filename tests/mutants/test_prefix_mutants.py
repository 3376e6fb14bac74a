"""Mistakes of prefix sharing, planted one at a time: a named test of the suite must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mutants.test_suite_mutants import cases, check_detected

import specdec_fast.cache.prefix as prefix_module
from specdec_fast.cache import PageAllocator, PagedCache, hybrid
from specdec_fast.cache.hybrid import HybridCache
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.request import Handle

Patch = pytest.MonkeyPatch


def partial_pages_are_shared(patch: Patch) -> None:
    """A page gets a name, and is shared, before its last token is stored."""
    upto = prefix_module.PageNames.upto

    def broken(self: Any, tokens: Sequence[int], length: int) -> list[bytes]:
        return upto(self, tokens, -(-length // self._page_size) * self._page_size)

    patch.setattr(prefix_module.PageNames, "upto", broken)


def the_root_counts_as_stored(patch: Patch) -> None:
    """A request that leaves names the page that its newest token would fill, though that token was never stored."""
    leave = PrefixSharing.leave
    patch.setattr(PrefixSharing, "leave", lambda self, handle, row, tokens: leave(self, handle, row, [*tokens, 0]))


def names_depend_on_one_page(patch: Patch) -> None:
    """The name of a page depends on its own tokens alone."""
    digest = prefix_module.blake2b
    patch.setattr(prefix_module, "blake2b", lambda before=b"", **options: digest(b"", **options))


def failed_prefills_get_names(patch: Patch) -> None:
    """A row counts as stored before its prefill."""
    join = PrefixSharing.join

    def broken(self: Any, handle: Handle, row: int, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        points = join(self, handle, row, tokens, pages)
        self._stored.add(row)
        return points

    patch.setattr(PrefixSharing, "join", broken)


def evicted_pages_keep_their_names(patch: Patch) -> None:
    """A page is allocated to another row and can still be found by its old name."""

    def broken(self: PageAllocator) -> int:
        return self._unowned.popitem(last=False)[0]

    patch.setattr(PageAllocator, "_evict", broken)


def shared_pages_cost_nothing(patch: Patch) -> None:
    """The pages that a request takes over count as free pages for the rest of its text too."""
    patch.setattr(PageAllocator, "num_free_without", lambda self, pages: self.num_free)


def requests_of_a_round_do_not_wait(patch: Patch) -> None:
    """Several samples of a prompt that begin together all compute it."""
    patch.setattr(PrefixSharing, "is_pending", lambda *arguments: False)


def salts_are_ignored(patch: Patch) -> None:
    """All requests share pages."""
    page_names = PagedCache.page_names
    patch.setattr(PagedCache, "page_names", lambda self, salt="": page_names(self))


def common_beginnings_are_not_saved(patch: Patch) -> None:
    """A prompt of a hybrid model saves no states where it stops being like an earlier one."""
    points = HybridCache.snapshot_points
    patch.setattr(HybridCache, "snapshot_points", lambda self, start, end, common=0: points(self, start, end))


def common_beginnings_are_dropped_first(patch: Patch) -> None:
    """The states of a prompt are kept in the order of their lengths, so that those that others share may go first."""
    patch.setattr(hybrid, "sorted", lambda lengths, key=None: sorted(lengths), raising=False)


def states_are_saved_under_an_earlier_length(patch: Patch) -> None:
    """States of a prompt count as those of one page before."""
    snapshot = HybridCache.snapshot

    def broken(self: HybridCache, row: int) -> None:
        snapshot(self, row)
        kept, length = self._snapshots[row], int(self.lengths[row])
        kept[length - self.page_size] = kept.pop(length)

    patch.setattr(HybridCache, "snapshot", broken)


def the_fullest_prompt_drops_its_first_states(patch: Patch) -> None:
    """Prompts that are read side by side drop the shortest saved states, which may be those that they share."""
    patch.setattr(HybridCache, "_snapshot_distance", 1)


HYBRID = "engine/test_hybrid_prefixes.py"
HYBRID_MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (
        common_beginnings_are_not_saved,
        HYBRID,
        "test_the_third_prompt_starts_behind_what_two_have_in_common",
        ("mamba",),
    ),
    (common_beginnings_are_dropped_first, HYBRID, "test_an_unrelated_prompt_drops_what_only_one_prompt_needs", ()),
    (states_are_saved_under_an_earlier_length, HYBRID, "test_texts_of_a_conversation_do_not_change", ("mamba", 0.0)),
    (
        the_fullest_prompt_drops_its_first_states,
        HYBRID,
        "test_prompts_that_come_together_keep_what_they_share",
        (6, 75),
    ),
]
SHARING, FAILURES = "engine/test_prefix_sharing.py", "engine/test_prefix_failures.py"
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (partial_pages_are_shared, SHARING, "test_texts_of_a_conversation_do_not_change", ("ngram", 0.8)),
    (the_root_counts_as_stored, SHARING, "test_texts_of_a_conversation_do_not_change", ("ngram", 0.8)),
    (names_depend_on_one_page, "cache/test_prefix.py", "test_a_name_depends_on_all_tokens_before_it", ()),
    (failed_prefills_get_names, FAILURES, "test_rows_of_a_failed_prefill_give_no_names", ()),
    (evicted_pages_keep_their_names, SHARING, "test_a_tight_pool_evicts_and_preempts_without_a_trace", ("none", 4, 14)),
    (shared_pages_cost_nothing, "cache/test_prefix.py", "test_pages_that_a_row_adopts_are_not_free_for_it", ()),
    (requests_of_a_round_do_not_wait, SHARING, "test_samples_of_one_prompt_prefill_it_once", ()),
    (salts_are_ignored, SHARING, "test_texts_with_different_salts_share_nothing", ()),
]


@cases(MUTANTS)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch)


@cases(HYBRID_MUTANTS)
def test_the_test_of_hybrid_models_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(hybrid, "SHORTEST_PREFIX", 8)
    monkeypatch.setattr(hybrid, "SNAPSHOT_DISTANCE", 16)
    check_detected(plant, file, test, arguments, monkeypatch)

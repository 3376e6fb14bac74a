"""Engines of several processes that compute one model together: what they must have in common, and its comparison.

A pass of a sharded model waits for all processes. If one of them has other requests or drafts, the others wait for
ever, or get garbage. Each engine therefore takes the same seeds, follows no clock, and compares its work with that of
the others: before it prefills, before it scores, and after it has new tokens. A difference is an error everywhere.
Tests: tests/engine/test_tensor_parallel.py, tests/engine/test_lockstep.py.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields
from enum import IntEnum
from typing import Any
from zlib import crc32

from specdec_fast.core.draft import Draft
from specdec_fast.core.ranks import LostRankError, Ranks, RanksError
from specdec_fast.core.request_seeds import request_seed
from specdec_fast.engine.request import Handle
from specdec_fast.sampling.params import SamplingParams

_NOTHING: AbstractContextManager[None] = nullcontext()


class Stage(IntEnum):
    """The moments in which engines compare what they work on."""

    BEGIN = 0
    PREFILL = 1
    SCORE = 2
    TOKENS = 3


class Lockstep:
    """Keeps the engines of all ranks of a sharded target in step. It does nothing for a target of one process.

    Args:
        target: The target. If it has `ranks`, these processes compute it together.
        drafter: The drafter, or None.
        budget: The policy for draft nodes.
        settings: What all engines must have in common: numbers, names, and parameters.

    Attributes:
        ranks: The processes, or None.
        next_id: Number of the next request.

    Raises:
        ValueError: If drafter or budget follow measured times, which differ between processes.
        RanksError: If the engines of the other processes have other settings.
    """

    def __init__(self, target: Any, drafter: Any, budget: Any, settings: Sequence[object]) -> None:
        self.ranks: Ranks | None = getattr(target, "ranks", None)
        self.next_id = 0
        self._cache = target.cache
        self._submitted: dict[Handle, int] = {}
        self._texts: dict[Handle, tuple[int, int]] = {}  # tokens seen, and their checksum
        if self.ranks is None:
            return
        _check_untimed(self.ranks, drafter, budget)
        drafts = getattr(drafter, "name", "none"), getattr(drafter, "num_draft_tokens", 0), budget.name
        settings = [*settings, *drafts, self._cache.max_rows, self._cache.max_length, self._cache.pages.num_pages]
        own_root = secrets.randbelow(2**63)
        self._root_seed = self.ranks.gather([own_root])[0][0]
        self.ranks.compare({"the settings of its engine": _checksum(settings), "its calls": int(Stage.BEGIN)})

    def why_no_graph(self) -> list[str]:
        """Returns why no step runs as a CUDA graph, in one sentence; an empty list if nothing here forbids it."""
        if self.ranks is None:
            return []
        return [f"{self.ranks.size} processes compute the model, and compare every draft on the host"]

    def next_seed(self) -> int | None:
        """Returns the seed of the next request if it has none, the same one on all ranks. None: it may draw its own."""
        if self.ranks is None:
            return None
        return request_seed(None, self._root_seed, str(self.next_id))

    def add(self, handle: Handle, cache_salt: str | None) -> None:
        """Adds a request that is about to be queued, with what its text depends on."""
        self.next_id += 1
        if self.ranks is not None:
            about = [*handle.prompt, _plain(handle.params), handle.num_draft_tokens, cache_salt]
            self._submitted[handle] = _checksum(about)

    def compare(
        self, stage: Stage, queued: Iterable[Handle], running: Mapping[int, Handle], draft: Draft | None = None
    ) -> None:
        """Compares what this engine works on with the engines of the other ranks.

        Args:
            stage: Why they compare now.
            queued: Requests in the queue, in order.
            running: Running requests by row, in order.
            draft: The draft that is about to be scored, or None.

        Raises:
            RanksError: If they differ. Requests that are the same everywhere may follow.
            LostRankError: If a process has ended.
        """
        if self.ranks is None:
            return
        requests = [(-1, each) for each in queued] + [*running.items()]
        known = [(row, each.request_id, self._submitted.get(each, 0), len(each.tokens)) for row, each in requests]
        facts = {
            "its requests": _checksum([self.next_id, *known]),
            "its texts": self._text_checksum(),
            "the free pages of its cache": self._cache.pages.num_free,
            "its drafts": 0 if draft is None else _draft_checksum(draft),
            "its calls": int(stage),
        }
        try:
            self.ranks.compare(facts)
        except LostRankError:
            raise
        except RanksError:  # all processes are here, so they can agree on the number of the next request
            self.next_id = max(number for (number,) in self.ranks.gather([self.next_id]))
            raise

    def for_other_requests(self) -> Lockstep:
        """Returns the same for an engine that has requests of its own."""
        other = copy(self)
        other._submitted, other._texts = {}, {}
        return other

    def guarding(self) -> AbstractContextManager[None]:
        """Returns a context in which errors of passes say that a process has ended, where they do."""
        return _NOTHING if self.ranks is None else self.ranks.naming_lost_ranks()

    def _text_checksum(self) -> int:
        """A checksum of all texts so far. Ended requests count a last time, unless their texts were cut off."""
        for handle in self._submitted:
            seen, checksum = self._texts.get(handle, (0, 0))
            fresh = array("q", handle.tokens[seen:])
            self._texts[handle] = len(handle.tokens), crc32(fresh.tobytes(), checksum)
        counted = [each for each in self._submitted if each.finish_reason not in ("cancelled", "error")]
        found = _checksum([(self._texts[each], each.finish_reason) for each in counted])
        for handle in [each for each in self._submitted if each.finished]:
            del self._submitted[handle], self._texts[handle]
        return found


def _check_untimed(ranks: Ranks, drafter: Any, budget: Any) -> None:
    """Raises ValueError for parts that decide by a clock."""
    drafts_by_clock = drafter is not None and drafter.needs.follows_clock
    if drafts_by_clock or getattr(budget, "follows_clock", False):
        what, name, instead = "budget", budget.name, "fixed"
        if drafts_by_clock:
            what, name, instead = "drafter", drafter.name, "suffix, recycling, or a forest of them"
        raise ValueError(
            f"{what}: got {name!r}, which follows measured times, and a model that {ranks.size} processes compute "
            f"together; expected the same decisions in all of them, whatever their clocks say; use {instead}"
        )


def _draft_checksum(draft: Draft) -> int:
    """A checksum of a draft. It waits for the drafter of a GPU: a near-tie there would mix two drafts in one pass."""
    return _checksum([*draft.counts, draft.max_depth, *draft.tokens.tolist(), *draft.parents.tolist()])


def _checksum(values: Sequence[object]) -> int:
    return crc32(repr(values).encode("utf-8", "surrogatepass"))


def _plain(value: Any) -> object:
    """What processes can compare of a value: objects have addresses of their own, so only their types count."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, SamplingParams):
        return [_plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return type(value).__qualname__

"""Which requests run: admission, page reservation, preemption and retirement.

Tests: tests/engine/test_pressure.py, tests/engine/test_interrupts.py, tests/engine/test_resource_cleanup.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

from specdec_fast.engine.cuda_graph.runner import CudaGraphRunner
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.prefill import Prefill
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.prompt_scoring import needs_scoring
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.engine.stats import Clock, RequestStats
from specdec_fast.interfaces import Needs, Target


class Scheduler(ABC):
    """The queue and the running requests of an engine. `Engine` derives from it and runs the steps.

    Attributes:
        target: The model that scores drafts.
        needs: Requirements of the drafter.
        state: Tokens, lengths and parameters of all rows.
        stats: Counters of all requests that have ended.
        seconds: Wall-clock seconds per phase; each step counts once.
    """

    target: Target
    needs: Needs
    _drafter_runner: DrafterRunner
    _graph_runner: CudaGraphRunner

    def __init__(self, target: Target, prefill_chunk: int | None, prefix_sharing: bool) -> None:
        if prefill_chunk is not None and (
            isinstance(prefill_chunk, bool) or not hasattr(prefill_chunk, "__index__") or prefill_chunk < 1
        ):
            raise ValueError(f"prefill_chunk: got {prefill_chunk!r}; expected a number of tokens, at least 1, or None")
        cache: Any = target.cache
        self.target, self._cache = target, cache
        self._prefill_chunk = prefill_chunk or (512 if cache.device.type == "cpu" else 2048)
        self.state = DecodeState(cache.max_rows, cache.max_length, cache.device)
        self.stats = RequestStats()
        self.seconds = Clock().seconds
        self._queue: deque[Handle] = deque()
        self._running: dict[int, Handle] = {}  # by row, in order of admission
        self._prefixes = PrefixSharing(target, self.needs, prefix_sharing)
        self._prefill = Prefill(target, self._prefixes.aux_hidden_states, self.state.device)

    @property
    def idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._queue and not self._running

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def num_queued(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def prefilling(self) -> list[Handle]:
        """Running requests whose tokens are not all prefilled, in order. They take no part in decoding yet."""
        return [handle for row, handle in list(self._running.items()) if row in self._prefill]

    def _ready(self) -> dict[int, Handle]:
        """The running requests that can decode, by row."""
        return {row: handle for row, handle in self._running.items() if row not in self._prefill}

    def _unfinished(self) -> list[Handle]:
        """Queued and running requests."""
        return [*self._queue, *self._running.values()]

    def _check_owner(self, handle: Handle) -> None:
        """Raises ValueError for a request of another engine."""
        held = None if handle.row is None else self._running.get(handle.row)
        if held is not handle and handle not in self._queue:
            raise ValueError(f"handle: got request {handle.request_id} of another engine; expected one of its own")

    def _keep_only(self, only: Collection[Handle]) -> None:
        """Returns all running requests but some to the queue."""
        if self._graph_runner.pending:
            self._drain_pending()
        for handle in reversed(list(self._running.values())):
            if handle not in only:
                self._requeue(handle)

    def _admit_queued(self, only: Collection[Handle] | None = None) -> None:
        """Admits queued requests, prefills at most `prefill_chunk` tokens, and gives complete rows to the drafter.

        Args:
            only: Requests that may leave the queue. None for all.
        """
        left = self._prefill_chunk
        try:
            self._join_queued(only)
            while self._prefill.rows:
                while left and (stored := self._prefill.run(left)):  # rows with scores take several passes
                    left -= stored
                self._begin_rows(self._prefill.complete_rows)
                if self._prefill.rows:
                    break
                self._join_queued(only)  # those that waited for pages of these rows
        except BaseException:  # keys and values are incomplete, so the requests start again later
            with ExitStack() as leaving:  # from the last to the first, and all of them even if one raises
                for row in self._prefill.rows:
                    if row in self._running:
                        leaving.callback(self._requeue, self._running[row])
                    else:
                        leaving.callback(self.state.leave, row)
                        self._prefill.discard(row)
            raise

    def _join_queued(self, only: Collection[Handle] | None) -> None:
        """Moves queued requests to free rows while there are pages for their tokens and one step.

        A request that shares a page with one that is being prefilled waits until that page is stored.

        Raises:
            RuntimeError: If the pool is smaller than a request that was accepted.
        """
        if self._queue:
            self._claim_cache()
        while self.state.num_free and (handle := self._next_queued(only)) is not None:
            tokens = [*handle.prompt, *handle.tokens]
            length = len(tokens) + self._drafter_runner.max_draft_nodes(handle)
            pages = [] if (scored := needs_scoring(handle)) else self._prefixes.find(handle, tokens)
            if not scored and self._prefill.rows and self._prefixes.is_pending(handle, tokens, pages):
                break
            if not self._has_pages_for(length, pages):
                if not self._running:
                    raise RuntimeError("engine: an empty pool has too few pages for a request that was accepted")
                break
            params = self._drafter_runner.params_with_request_key(handle)
            salt = self._prefixes.salt_of(handle)
            row = self.state.join(tokens, params, len(handle.prompt), handle.stop_ids, salt)
            stored = self._prefixes.num_tokens(pages)
            self._prefill.add(row, handle, tokens[stored:-1])
            handle.row, self._running[row] = row, handle
            self._queue.remove(handle)
            points = self._prefixes.join(handle, row, tokens, pages)
            self._prefill.save_states(row, [point - stored for point in points])
            self._cache.reserve(row, length)
            if (begin_row := getattr(self.target, "begin_row", None)) is not None:
                begin_row(row, self.state.longest(row))

    def _next_queued(self, only: Collection[Handle] | None) -> Handle | None:
        """Returns the first queued request that may run."""
        return next((each for each in self._queue if only is None or each in only), None)

    def _has_pages_for(self, length: int, shared: list[int]) -> bool:
        """Whether an empty row can have `length` tokens, the first ones in shared pages."""
        if shared:
            return bool(self._cache.has_pages_for(length, shared))
        return bool(self._cache.pages_for(length) <= self._cache.pages.num_free)

    def _begin_rows(self, rows: list[int]) -> None:
        """Adds prefilled rows to the drafter."""
        if rows:
            output = self._prefixes.finish_prefill(self.state, self._running, rows, self._prefill.collect(rows))
            self._drafter_runner.begin(self.state, rows, output)
            for row in rows:
                self._prefill.discard(row)

    def _claim_cache(self) -> None:
        """Makes sure that no other engine uses the cache, and frees rows that no request has."""
        self._cache.claim(self, self._running)
        for row in self.state.taken_rows - self._running.keys():  # an interrupt came as it joined or left
            self.state.leave(row)
        if not self._running:
            self._prefixes.begin_busy_time()

    def _reserve_pages(self) -> None:
        """Reserves pages for the nodes of this step. If there are too few, it preempts the youngest requests."""
        for row, handle in list(self._running.items()):
            while row in self._running and not self._cache.reserve(row, self._slots_needed(row, handle)):
                if self._graph_runner.pending:
                    self._drain_pending()  # texts may have ended, and preempted requests keep all their tokens
                    continue
                youngest = next(reversed(self._running.values()))
                youngest.stats.preemptions += 1
                self._requeue(youngest)

    def _slots_needed(self, row: int, handle: Handle) -> int:
        """Slots that a row may use by the end of the next step, whatever pending steps accept."""
        nodes = self._drafter_runner.max_draft_nodes(handle)
        pending = self._graph_runner.pending_steps(handle) * (nodes + 1) if self._graph_runner.pending else 0
        return self.state.length(row) + min(pending + nodes, handle.remaining)

    @abstractmethod
    def _drain_pending(self, clock: Clock | None = None) -> None:
        """Reads all pending steps."""

    def _requeue(self, handle: Handle) -> None:
        """Returns a request to the head of the queue. Its tokens stay; keys and values will be recomputed."""
        try:
            self._retire(handle)
        finally:
            if handle in self._running.values():  # an interrupt came before it left: it must not be in both places
                self._retire(handle)
            if handle not in self._queue:
                self._queue.appendleft(handle)

    def _requeue_running(self) -> None:
        """Requeues all requests after a failure: keys and values may be ahead of the texts."""
        with ExitStack() as leaving:  # from the last to the first, and all of them even if one raises
            for handle in self._running.values():
                leaving.callback(self._retire if handle.finished else self._requeue, handle)

    def _retire(self, handle: Handle) -> None:
        """Takes a request off its row and frees everything that it held."""
        row = handle.row
        assert row is not None
        del self._running[row]  # first: if an interrupt comes before it, the request still runs
        handle.row = None
        with ExitStack() as leaving:  # from the last to the first, and all of them even if one raises
            if handle.finished:
                leaving.callback(self.stats.merge, handle.stats)
            leaving.callback(self.state.leave, row)
            leaving.callback(self._drafter_runner.release, [row])
            leaving.callback(self._cache.release, [row])
            leaving.callback(self._prefixes.leave, handle, row, self.state.tokens(row))
            leaving.callback(self._prefill.discard, row)
            leaving.callback(self._graph_runner.leave, row)

    def _end_without_text(self, clock: Clock) -> list[Handle]:
        """Ends the requests that generate nothing, after their prefill. Returns them."""
        ended = [handle for handle in self._ready().values() if not handle.params.max_new_tokens]
        for handle in ended:
            handle.finish("length")
            handle.stats.seconds["prefill"] += clock.seconds["prefill"]
            self._retire(handle)
        return ended

    def _account_and_retire(self, handles: Sequence[Handle], clock: Clock) -> None:
        """Adds the seconds of a step to its requests, and retires those of them that have ended.

        Args:
            handles: The requests that decoded.
            clock: The phases of the step. Requests that are still being prefilled took part in its prefill alone.
        """
        for handle in self.prefilling:
            handle.stats.seconds["prefill"] += clock.seconds["prefill"]
        for handle in handles:
            for phase, seconds in clock.seconds.items():
                handle.stats.seconds[phase] += seconds
            if handle.finished and handle.row is not None:
                self._retire(handle)
        for phase, seconds in clock.seconds.items():
            self.seconds[phase] += seconds

"""Runs an engine until texts are complete: `stream` for one request, `generate` for a batch of prompts.

Tests: tests/engine/test_streaming.py, tests/engine/test_threads.py, tests/engine/test_interrupts.py.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from specdec_fast.engine.prompts import Prompt, Prompts
from specdec_fast.engine.request import Handle, pair_with_params, rejected_handle, warn_of_errors
from specdec_fast.engine.synchronized import is_held_here
from specdec_fast.sampling.params import SamplingParams

log = logging.getLogger("specdec_fast")


class TextMethods(ABC):
    """Methods of an engine that run it until texts are complete. `Engine` derives from it.

    Attributes:
        lock: Held while requests or their texts change.
    """

    lock: threading.RLock

    def __init__(self) -> None:
        self._abandoned: deque[Handle] = deque()  # requests whose last stream was closed

    @abstractmethod
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        add_special_tokens: bool | None = None,
    ) -> Handle:
        """Queues a request."""

    @abstractmethod
    def step(self) -> list[Handle]:
        """Prefills some tokens, then advances every prefilled request by one target pass."""

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Ends a request now."""

    @abstractmethod
    def _check_owner(self, handle: Handle) -> None:
        """Raises ValueError for a request of another engine."""

    def stream(self, handle: Handle, *, cancel_on_close: bool = True) -> TextPieces:
        """Returns an iterator over the text of a request, which runs steps until the request ends.

        Several threads may stream requests of one engine, or the same request. Every step advances all requests, and
        the lock is free while the caller handles a piece.

        Args:
            handle: A request of this engine. If it has ended, no step runs.
            cancel_on_close: Whether the request is cancelled when the iterator is closed before the text ends, or
                dropped: by `break`, by an exception in the loop, or by garbage collection. It continues while another
                stream of the same request is open. Without this, a later stream may continue the text.

        Returns:
            An iterator over pieces of text that can no longer change. The pieces joined are `handle.text`. It raises
            whatever a step raises, and ValueError for a running request of another engine.
        """
        return TextPieces(self, handle, cancel_on_close)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        num_draft_tokens: int | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[Handle]:
        """Generates texts for a batch of prompts, and returns when all have ended.

        They are batched with the other requests of the engine. Under rule `replay`, requests of one seed share their
        noise.

        Args:
            prompts: Prompts as in `submit`, or all of them as a tensor [prompts, n] or as a tokenizer returns them.
                Padding that an attention mask shows is dropped.
            params: Sampling parameters of all prompts, or one for each. None for the defaults.
            num_draft_tokens: Draft tokens per step and request. None for the drafter's default.
            add_special_tokens: As in `submit`.

        Returns:
            Handles in the order of the prompts. A prompt that the engine cannot serve gets a handle with
            `finish_reason="error"` and the exception in `error`; the others run, and a warning is logged.

        Raises:
            ValueError: For a single prompt as prompts, for `params` of another kind, or if there are not as many
                `params` as prompts.
            BaseException: Whatever a step raises, interrupts included. All requests of this call are cancelled first.
        """
        given = {"num_draft_tokens": num_draft_tokens, "add_special_tokens": add_special_tokens}
        handles = self._generate(pair_with_params(prompts, params), **given)
        warn_of_errors(handles)
        return handles

    def _generate(self, pairs: Iterable[tuple[Prompt, SamplingParams | None]], **given: Any) -> list[Handle]:
        """Generates as `generate` does, and leaves the report of errors to its caller."""
        handles: list[Handle] = []
        try:
            for prompt, own in pairs:
                try:
                    handles.append(self.submit(prompt, own, **given))
                except ValueError as error:
                    handles.append(rejected_handle(own, error))
            with torch.inference_mode():  # entered once, not in every step
                while not all(handle.finished for handle in handles):
                    self.step()
        except BaseException:  # the caller never gets these handles, so they are cancelled here
            with ExitStack() as ends:  # all of them, even if one raises
                for handle in reversed(handles):
                    ends.callback(self.cancel, handle)
            raise
        return handles

    def _abandon(self, handle: Handle, wait: bool) -> None:
        """Cancels a request now, or before the next step if this thread or another one works on the engine.

        Args:
            handle: The request.
            wait: Whether to wait for another thread. Finalizers must not: that thread may wait for this one.
        """
        self._abandoned.append(handle)
        if is_held_here(self.lock) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        if self.lock.acquire(blocking=wait):
            try:
                self._cancel_abandoned()
            finally:
                self.lock.release()

    def _cancel_abandoned(self) -> None:
        """Cancels the requests whose streams were all closed."""
        while self._abandoned:
            handle = self._abandoned.popleft()
            if handle.streams or handle.finished:
                continue
            try:
                self._check_owner(handle)
            except ValueError:  # a request of another engine
                continue
            try:
                self.cancel(handle)
            except Exception:  # it concerns no other request
                log.exception("request %d: it could not be cancelled cleanly", handle.request_id)


class TextPieces(Iterator[str]):
    """The text of a request, piece by piece, as `Engine.stream` returns it. It may be used in a `with` block.

    Args:
        engine: The engine that runs the steps.
        handle: The request.
        cancel_on_close: Whether closing the last stream of a request cancels it.
    """

    def __init__(self, engine: TextMethods, handle: Handle, cancel_on_close: bool) -> None:
        self._engine, self._handle, self._cancels = engine, handle, cancel_on_close
        self._shown, self._over = 0, False
        self._entry: object | None = object()  # of this stream, while it is open
        handle.streams.add(self._entry)

    def __iter__(self) -> TextPieces:
        return self

    def __next__(self) -> str:
        engine, handle = self._engine, self._handle
        while not self._over and self._entry is not None:
            with engine.lock:
                if not (handle.finished or handle.stable_text(self._shown)):  # unless another thread has made progress
                    engine._check_owner(handle)
                    engine.step()
                self._over, fresh = handle.finished, handle.stable_text(self._shown)
            self._shown += len(fresh)
            if fresh:
                return fresh
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the stream. It cancels the request if `cancel_on_close` was not False and no other stream is open."""
        self._leave(wait=True)

    def _leave(self, wait: bool) -> None:
        entry, self._entry = self._entry, None
        if entry is None:
            return
        self._handle.streams.discard(entry)
        if self._cancels and not (self._handle.finished or self._handle.streams):
            self._engine._abandon(self._handle, wait)

    def __del__(self) -> None:
        if getattr(self, "_entry", None) is not None:
            self._leave(wait=False)

    def __enter__(self) -> TextPieces:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

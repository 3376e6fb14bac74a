"""The thread that owns the engine: it submits, steps and cancels, and publishes what every step added.

Nothing else calls the engine, so no request waits for a lock during a step. Tests: tests/server/test_engine_loop.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Handle
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.sampling.params import SamplingParams

log = logging.getLogger("specdec_fast")
_LONGEST_PAUSE = 1.0
"""Most seconds between two tries of a step that fails."""


class EngineStopped(RuntimeError):
    """The engine's thread has ended."""


class EngineFailed(RuntimeError):
    """Steps failed again and again while they worked on a request."""


@dataclass(eq=False, slots=True)
class Job:
    """A text that the engine generates.

    Attributes:
        prompt: Token ids of the prompt.
        params: Sampling parameters.
        streams: Whether text is wanted before the end.
        receive: Called with the progress by the publisher.
        cache_salt: Jobs of different salts share no pages of the cache.
        handle: The engine's handle, once it is submitted.
        error: Why the server ended the text, or None.
        shown: Characters that were published.
        counted: Tokens that were published.
    """

    prompt: list[int]
    params: SamplingParams
    streams: bool
    receive: Callable[[Progress], None]
    cache_salt: str | None = None
    handle: Handle | None = None
    error: Exception | None = None
    shown: int = 0
    counted: int = 0


class Progress(NamedTuple):
    """What a step added to a job. `finish_reason` is None while the text continues."""

    job: Job
    text: str
    num_tokens: int
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None
    error: Exception | None


class EngineLoop:
    """Runs an engine in a thread.

    Args:
        engine: The engine.
        publish: Called in the thread with the progress of all jobs after a step. It must not block.

    Attributes:
        failures: Number of steps that raised since the last one that did not.
    """

    def __init__(self, engine: Engine, publish: Callable[[list[Progress]], None]) -> None:
        self.failures = 0
        self._engine, self._publish = engine, publish
        self._active: dict[Job, None] = {}  # in order of submission
        self._suspects: list[list[Job]] = []  # groups of jobs: one of them made steps fail; the last is tried first
        self._cleared = False  # whether every group ran without failure since the last step of all
        self._retried: list[Job] = []  # jobs of the last failure
        self._pauses = False  # whether the last step failed
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Ends all jobs and the thread, and waits for a running step.

        Args:
            timeout: Most seconds to wait.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def submit(self, jobs: Sequence[Job]) -> Future[None]:
        """Submits jobs between two steps: all of them, or none if the engine refuses one.

        Args:
            jobs: New jobs.

        Returns:
            A future, done when all are queued. It has the ValueError of the engine, or `EngineStopped`.
        """
        return self._call(lambda: self._submit(jobs))

    def cancel(self, jobs: Sequence[Job] | None = None, error: Exception | None = None) -> Future[None]:
        """Ends jobs between two steps. Those that have ended are left alone.

        Args:
            jobs: The jobs. None for all.
            error: The error that they end with, or None.

        Returns:
            A future, done when they have ended.
        """
        return self._call(lambda: self._cancel(jobs, error))

    def _call(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs a function in the thread, between two steps."""
        future: Future[Any] = Future()
        with self._wake:
            if self._stopping or not self.alive:
                future.set_exception(EngineStopped("the engine has stopped"))
            else:
                self._calls.append((future, work))
                self._wake.notify()
        return future

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Serves calls and steps until `stop`, whatever a step raises."""
        try:
            with torch.inference_mode():
                while self._wait():
                    self._serve_calls()
                    self._step()
                    self._report()
        except BaseException:
            log.critical("the engine's thread ended", exc_info=True)
        finally:
            with self._wake:
                self._stopping = True
            for future, _ in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStopped("the engine has stopped"))
            for job in list(self._active):
                self._end(job, EngineStopped("the engine has stopped"))
            self._report()

    def _wait(self) -> bool:
        """Sleeps while there is nothing to do. Returns whether the thread goes on."""
        with self._wake:
            if self._pauses and not self._suspects:  # memory may be freed in the meantime
                self._wake.wait(min(0.02 * 2**self.failures, _LONGEST_PAUSE))
            while not (self._calls or self._stopping or not self._engine.idle):
                self._wake.wait()
            return not self._stopping

    def _serve_calls(self) -> None:
        while self._calls:
            future, work = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _submit(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                job.handle = self._engine.submit(job.prompt, job.params, cache_salt=job.cache_salt)
        except BaseException:
            for job in jobs:
                if job.handle is not None:
                    self._engine.cancel(job.handle)
            raise
        self._active.update(dict.fromkeys(jobs))

    def _cancel(self, jobs: Sequence[Job] | None, error: Exception | None) -> None:
        for job in list(self._active) if jobs is None else jobs:
            self._end(job, error)

    def _step(self) -> None:
        """Runs a step. The engine keeps all requests of one that fails, so it is tried again.

        After the second failure in a row, steps of half of the requests, of quarters and so on find those that fail
        alone. These end; all others go on. Earlier slices of a prefill may succeed, so a successful step clears a
        request only once its prefill is complete.
        """
        group = self._next_suspects()
        self._pauses = False
        try:
            self._engine.step(None if group is None else {job.handle for job in group if job.handle is not None})
        except Exception as error:
            self.failures += 1
            self._pauses, self._retried = True, list(self._active)
            log.exception("a step failed, for the %d. time in a row", self.failures)
            if group is not None:
                self._narrow(group, error)
            elif self.failures > 1:
                self._suspect_admitted(error)
        else:
            prefilling = self._engine.prefilling
            if group is None:
                self._retried = [job for job in self._retried if job.handle in prefilling]
                if not self._retried:
                    self.failures, self._cleared = 0, False
            elif prefilling:
                self._suspects.append(group)
            else:
                self.failures = 0

    def _next_suspects(self) -> list[Job] | None:
        """Returns the requests of the next step: a group that is suspected, or None for all."""
        while self._suspects:
            if group := [job for job in self._suspects.pop() if job in self._active]:
                return group
        return None

    def _suspect_admitted(self, error: Exception) -> None:
        """Begins to look for the requests that make steps fail.

        If each runs without the others, they are too many together. Then the youngest one ends.
        """
        admitted = list(self._active)[: self._engine.state.max_rows]  # requests are admitted in order
        if self._cleared:
            admitted = admitted[-1:]
        self._cleared = True
        if admitted:
            self._narrow(admitted, error)

    def _narrow(self, group: list[Job], error: Exception) -> None:
        """Splits a group whose step failed, or ends the only request of it."""
        middle = len(group) // 2
        if middle:
            self._suspects += [group[middle:], group[:middle]]
        else:
            self._cleared = False
            self._end(group[0], EngineFailed(f"a step failed again and again: {error!r}"))

    def _end(self, job: Job, error: Exception | None) -> None:
        """Ends a job, whatever the engine raises while it frees what the request held."""
        if job.handle is None or job.handle.finished:
            return
        job.error = error
        try:
            self._engine.cancel(job.handle)
        except Exception:
            log.exception("request %d: cancelling it failed", job.handle.request_id)

    def _report(self) -> None:
        """Publishes the progress of all jobs since the last report, and forgets those that have ended."""
        news = [self._progress(job) for job in self._active if self._has_news(job)]
        for progress in news:
            if progress.finish_reason is not None:
                del self._active[progress.job]
        if news:
            self._publish(news)

    @staticmethod
    def _has_news(job: Job) -> bool:
        assert job.handle is not None
        return job.handle.finished or len(job.handle.tokens) > job.counted

    def _progress(self, job: Job) -> Progress:
        handle = job.handle
        assert handle is not None
        try:
            text = handle.stable_text(job.shown) if job.streams or handle.finished else ""
        except Exception as error:  # the tokenizer's: it ends this request alone
            self._end(job, error)
            text = ""
        new = len(handle.tokens) - job.counted
        logprobs = handle.logprobs[job.counted :]
        job.shown, job.counted = job.shown + len(text), job.counted + new
        return Progress(job, text, new, logprobs, handle.finish_reason, job.error or handle.error)

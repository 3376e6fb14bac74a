"""The texts of HTTP requests, as the event loop sees them: admission, progress, cancellation.

Text that a client does not read stays in its `Sample`, so a slow reader delays no other. Tests:
tests/server/test_streams.py, tests/server/test_limits.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from specdec_fast.engine.engine import Engine
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.server.engine_loop import EngineFailed, EngineLoop, EngineStopped, Job, Progress
from specdec_fast.server.errors import APIError, StoppedError, refused, refusing
from specdec_fast.server.metrics import Metrics, TextMeter
from specdec_fast.server.settings import Settings

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to a text. `finish_reason` is "stop" or "length" in the last piece, else None."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        tokens: Token ids.
        params: Sampling parameters of each text that follows them.
        cache_salt: Salt of shared pages.
    """

    tokens: list[int]
    params: Sequence[SamplingParams]
    cache_salt: str | None = None


class Sample:
    """One text, and what its reader has not taken yet.

    Args:
        prompt: The prompt.
        params: Sampling parameters.
        streams: Whether text is wanted before the end.
        changed: Called whenever something was added.
        meter: Counts tokens and seconds.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        streams: bool,
        changed: Callable[[], None],
        meter: TextMeter,
    ) -> None:
        self.job = Job(prompt.tokens, params, streams, self._receive, prompt.cache_salt)
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._error: APIError | None = None
        self._text, self._logprobs = "", list[TokenLogprob]()
        self._changed, self._meter = changed, meter

    def _receive(self, progress: Progress) -> None:
        self._meter.record(progress.num_tokens, progress.finish_reason)
        self._text += progress.text
        self._logprobs += progress.logprobs
        self.num_tokens += progress.num_tokens
        self.finish_reason = progress.finish_reason
        if progress.finish_reason not in (None, *_FINISH_REASONS):
            self._error = _explain(progress.error)
        if progress.text or progress.finish_reason is not None:
            self._changed()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were shared; 0 while the text continues."""
        handle = self.job.handle
        return (
            0 if self.finish_reason is None or handle is None else min(handle.stats.cached_tokens, len(handle.prompt))
        )

    def take(self, index: int) -> Piece | None:
        """Returns what was added since the last call, or None.

        Raises:
            APIError: If the text ended with an error. What came before it was returned by the last call.
        """
        if not (self._text or self.finish_reason is not None):
            return None
        if self._error is not None and not self._text:
            raise self._error
        reason = _FINISH_REASONS.get(self.finish_reason or "")
        piece = Piece(index, self._text, self._logprobs, reason)
        self._text, self._logprobs = "", []
        return piece


def _explain(error: Exception | None) -> APIError:
    """Returns the error that a client gets for a text that ended with `error`."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineStopped):
        return StoppedError()
    if isinstance(error, EngineFailed):
        return APIError(500, "the engine failed again and again while it generated this text; its log has the reason")
    if isinstance(error, ValueError):  # worded for users
        words, ended = re.subn(r"^request \d+: (?=grammar: no token)", "", str(error))
        return refused(words) if ended else APIError(500, words)  # clients repeat what ends with 500
    return APIError(500, "this text could not be generated; the server's log has the reason")


class Generation:
    """The texts of one HTTP request.

    Args:
        loop: The engine's thread.
        prompts: The prompts.
        streams: Whether text is wanted before the end.
        metrics: Counters of the server.

    Attributes:
        prompts: The prompts.
        samples: The texts, in the order of the prompts and of their parameters.
    """

    def __init__(self, loop: EngineLoop, prompts: Sequence[Prompt], streams: bool, metrics: Metrics) -> None:
        self.prompts = prompts
        self._loop, self._news = loop, asyncio.Event()
        self._prompt_indices = [at for at, prompt in enumerate(prompts) for _ in prompt.params]
        self.samples = [
            Sample(prompt, params, streams, self._news.set, TextMeter(metrics))
            for prompt in prompts
            for params in prompt.params
        ]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields what is added to any of the texts, until all have ended.

        Raises:
            APIError: If a text ended with an error.
        """
        running = dict(enumerate(self.samples))
        while running:
            await self._news.wait()
            self._news.clear()
            for index, sample in list(running.items()):
                piece = sample.take(index)
                if piece is None:
                    continue
                if sample.finish_reason is not None:
                    if piece.finish_reason is None:  # the error comes after the text
                        self._news.set()
                    else:
                        del running[index]
                yield piece

    def number_of_prompt(self, index: int) -> int:
        """Returns the index of the prompt of a text."""
        return self._prompt_indices[index]

    def prompt_of(self, index: int) -> Prompt:
        """Returns the prompt of a text."""
        return self.prompts[self._prompt_indices[index]]

    def prompt_logprobs(self, index: int) -> list[TokenLogprob | None]:
        """Returns the log-probabilities of the prompt of a text. Something of its first text must have arrived."""
        handle = self.samples[self._prompt_indices.index(self._prompt_indices[index])].job.handle
        return [] if handle is None else handle.prompt_logprobs or []

    def usage(self) -> dict[str, Any]:
        """Returns the object `usage` of the API for the tokens so far. A prompt of several texts counts once."""
        prompt = sum(len(each.tokens) for each in self.prompts)
        completion, cached, first = sum(sample.num_tokens for sample in self.samples), 0, 0
        for each in self.prompts:
            cached += self.samples[first].num_cached_tokens
            first += len(each.params)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def close(self) -> None:
        """Cancels the texts that have not ended."""
        jobs = [sample.job for sample in self.samples if sample.finish_reason is None]
        if jobs:
            self._loop.cancel(jobs)


class Service:
    """One engine, and all that HTTP requests share.

    Args:
        engine: The engine. The service is its only user while it runs.
        settings: Settings of the server.

    Attributes:
        engine: The engine.
        settings: The settings.
        metrics: Counters for Prometheus.

    Raises:
        ValueError: If the engine has no tokenizer, or is one of several that compute a model together.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        if engine.tokenizer is None:
            raise ValueError("serve: got a model without a tokenizer; expected one; put its files into the folder")
        if (ranks := getattr(engine.target, "ranks", None)) is not None:
            raise ValueError(
                f"serve: got a model that {ranks.size} processes compute together; expected a whole one, since "
                "requests reach one process alone; load it without tp_plan, or serve it by vLLM, which shards models"
            )
        self.engine, self.settings, self.metrics = engine, settings, Metrics(engine)
        self._loop = EngineLoop(engine, self._publish)
        self._workers = ThreadPoolExecutor(1, "specdec-prepare")
        self._open = 0
        self._draining = False

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread. Call it in the event loop."""
        self._events = asyncio.get_running_loop()
        self._loop.start()

    def stop(self, timeout: float | None = None) -> None:
        """Ends all texts and the engine's thread. Calling it twice is harmless.

        Args:
            timeout: Most seconds to wait for a running step.
        """
        self._draining = True
        self._loop.stop(timeout)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Refuses further requests; those that run continue."""
        self._draining = True

    def end_all(self) -> None:
        """Ends all texts with status 503."""
        self._loop.cancel(error=APIError(503, "the server shuts down", code="unavailable"))

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._loop.alive and not self._draining

    @property
    def num_texts(self) -> int:
        """Number of texts that run or wait."""
        return self._open

    # -- requests ---------------------------------------------------------------------------------------------------

    async def prepare(self, work: Callable[[], _Result]) -> _Result:
        """Runs tokenization or the compilation of a grammar beside the event loop, one call at a time.

        Args:
            work: A function that may raise ValueError about the request.

        Returns:
            Its result.

        Raises:
            StoppedError: If the server stops.
        """
        if self._draining:
            raise StoppedError
        with refusing():
            return await self._events.run_in_executor(self._workers, work)

    def check_count(self, count: int) -> None:
        """Checks the number of texts of one request, before anything is made for each of them.

        Raises:
            APIError: With status 400 if they never fit into the queue.
        """
        capacity = self.engine.state.max_rows + self.settings.max_queue
        if count > capacity:
            words = f"got {count} texts in one request; expected at most {capacity}; send several requests"
            raise APIError(400, f"n: {words}", param="n")

    async def generate(self, prompts: Sequence[Prompt], *, streams: bool) -> Generation:
        """Submits the texts of one HTTP request.

        Args:
            prompts: The prompts.
            streams: Whether text is wanted before the end.

        Returns:
            The texts, all of them queued.

        Raises:
            APIError: With status 400 or 429 if the engine or the queue cannot take them.
            StoppedError: If the server stops.
            BaseException: If this task is cancelled, after its texts.
        """
        rows, count = self.engine.state.max_rows, sum(len(prompt.params) for prompt in prompts)
        self.check_count(count)
        if self._open + count > rows + self.settings.max_queue:
            self.metrics.rejected.inc()
            words = f"{self._open} texts run or wait; the queue holds {self.settings.max_queue} beside {rows} that run"
            raise APIError(429, f"the queue is full: {words}; try again later", code="queue_full")
        if not self.healthy:
            raise StoppedError
        generation = Generation(self._loop, prompts, streams, self.metrics)
        self._open += count
        submitted = asyncio.wrap_future(self._loop.submit([sample.job for sample in generation.samples]))
        submitted.add_done_callback(lambda done: self._close(count) if done.exception() else None)
        try:
            with refusing():
                await asyncio.shield(submitted)
        except EngineStopped:
            raise StoppedError from None
        except BaseException:
            generation.close()
            raise
        self.metrics.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in prompts))
        return generation

    def _close(self, count: int) -> None:
        self._open -= count

    def _publish(self, news: list[Progress]) -> None:
        """Passes news from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the event loop is closed
            self._events.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[Progress]) -> None:
        for progress in news:
            progress.job.receive(progress)
            if progress.finish_reason is not None:
                self._close(1)

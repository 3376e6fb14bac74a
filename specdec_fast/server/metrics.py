"""Metrics in the format of Prometheus. Tests: tests/server/test_metrics.py."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from specdec_fast.engine.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _EngineCollector(Collector):
    """Reads the numbers that the engine keeps. Those of texts count when a text ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield GaugeMetricFamily("specdec_texts_running", "Texts that have a row of the engine.", engine.num_running)
        yield GaugeMetricFamily("specdec_texts_queued", "Texts that wait for a row.", engine.num_queued)
        yield GaugeMetricFamily("specdec_tau", "Tokens per target pass of all ended texts.", stats.tau)
        yield GaugeMetricFamily("specdec_acceptance_rate", "Accepted among tested draft tokens.", stats.alpha)
        for name, value, words in (
            ("steps", stats.steps, "Target passes of ended texts. Texts of a batch count one each."),
            ("draft_tokens", stats.num_draft_tokens, "Draft tokens of ended texts."),
            ("accepted_draft_tokens", stats.num_accepted, "Accepted draft tokens of ended texts."),
            ("cached_prompt_tokens", stats.cached_tokens, "Prompt tokens of ended texts that were shared."),
            ("preemptions", stats.preemptions, "Preemptions of ended texts."),
            ("drafter_faults", stats.faults, "Exceptions of the drafter in ended texts."),
        ):
            yield CounterMetricFamily(f"specdec_{name}", words, value)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self.http = Counter("specdec_http_requests", "HTTP requests.", ("path", "status"), registry=registry)
        self.rejected = Counter("specdec_rejected_requests", "Requests that met a full queue.", registry=registry)
        self.prompt_tokens = Counter("specdec_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.tokens = Counter("specdec_generated_tokens", "Generated tokens.", registry=registry)
        self.texts = Counter("specdec_texts", "Texts that have ended.", ("finish_reason",), registry=registry)
        self.first_token = self._seconds("time_to_first_token", "from the submission of a text to its first token.")
        words = "per token, observed once per step and text; a step adds several tokens at once."
        self.inter_token = self._seconds("inter_token_latency", words)
        self.whole = self._seconds("text", "from the submission of a text to its end.")

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(f"specdec_{name}_seconds", f"Seconds {words}", buckets=_SECONDS, registry=self._registry)

    def response(self) -> Response:
        """Returns all metrics as a response."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class TextMeter:
    """Measures one text from its creation.

    Args:
        metrics: The metrics that get the measurements.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._start = metrics, perf_counter()
        self._last: float | None = None

    def record(self, num_tokens: int, finish_reason: str | None) -> None:
        """Records what a step added.

        Args:
            num_tokens: Number of new tokens.
            finish_reason: Why the text ended, or None.
        """
        now, metrics = perf_counter(), self._metrics
        if num_tokens:
            metrics.tokens.inc(num_tokens)
            if self._last is None:
                metrics.first_token.observe(now - self._start)
            else:
                metrics.inter_token.observe((now - self._last) / num_tokens)
            self._last = now
        if finish_reason is not None:
            metrics.whole.observe(now - self._start)
            metrics.texts.labels(finish_reason).inc()

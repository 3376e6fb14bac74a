"""The engine's thread: failing steps, requests that the engine refuses, its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from oracles.toy_server import SECONDS, Running, make_engine, nothing_is_held, wait_for

from specdec_fast import SamplingParams
from specdec_fast.server.engine_loop import EngineLoop, EngineStopped, Job, Progress

Start = Callable[..., Running]
PARAMS = SamplingParams(seed=1, max_new_tokens=12)


def jobs(count: int, prompt: tuple[int, ...] = (1, 2)) -> tuple[list[Job], list[list[Progress]]]:
    """Jobs, and what each of them receives."""
    received: list[list[Progress]] = [[] for _ in range(count)]
    made = [Job([*prompt, at], SamplingParams(seed=at, max_new_tokens=12), True, got.append) for at, got in
            enumerate(received)]  # fmt: skip
    return made, received


def publish(news: list[Progress]) -> None:
    for progress in news:
        progress.job.receive(progress)


def ended(received: list[list[Progress]]) -> bool:
    return all(got and got[-1].finish_reason is not None for got in received)


@pytest.fixture
def run() -> Any:
    """Starts the thread of an engine, and ends it with the test."""
    loops: list[EngineLoop] = []

    def begin(engine: Any) -> EngineLoop:
        loops.append(EngineLoop(engine, publish))
        loops[-1].start()
        return loops[-1]

    yield begin
    for loop in loops:
        loop.stop(SECONDS)
        assert not loop.alive


def texts(received: list[list[Progress]]) -> list[str]:
    return ["".join(progress.text for progress in got) for got in received]


def plain(count: int) -> list[str]:
    prompts = [[1, 2, at] for at in range(count)]
    params = [SamplingParams(seed=at, max_new_tokens=12) for at in range(count)]
    return [handle.text for handle in make_engine(drafter=None).generate(prompts, params)]


def test_pieces_are_the_text(run: Callable[[Any], EngineLoop]) -> None:
    made, received = jobs(12)
    loop = run(make_engine(max_rows=3))
    loop.submit(made).result(SECONDS)
    wait_for(lambda: ended(received))
    assert texts(received) == plain(12)
    assert [sum(progress.num_tokens for progress in got) for got in received] == [12] * 12
    assert all(progress.finish_reason is None for got in received for progress in got[:-1])


def test_a_step_that_fails_once_costs_nothing(
    run: Callable[[Any], EngineLoop], caplog: pytest.LogCaptureFixture
) -> None:
    engine, passes = make_engine(max_rows=3), iter(range(1000))

    def fail() -> None:
        if next(passes) % 7 == 3:
            raise RuntimeError("planted")

    engine.target.before_pass = fail
    made, received = jobs(8)
    run(engine).submit(made).result(SECONDS)
    wait_for(lambda: ended(received))
    assert texts(received) == plain(8) and "planted" in caplog.text


def fail_while(engine: Any, condition: Callable[[], bool]) -> None:
    """Makes passes of the target fail while a condition holds."""

    def fail() -> None:
        if condition():
            raise RuntimeError("planted")

    engine.target.before_pass = fail


def is_running(job: Job) -> bool:
    return job.handle is not None and job.handle.row is not None and not job.handle.finished


@pytest.mark.parametrize("at", [(0,), (2,), (4,), (0, 2)])
def test_requests_that_break_every_step_end_alone(
    run: Callable[[Any], EngineLoop], caplog: pytest.LogCaptureFixture, at: tuple[int, ...]
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(max_rows=4)
    made, received = jobs(7)
    poison, causes = jobs(len(at), prompt=(9, 9, 9))
    fail_while(engine, lambda: any(map(is_running, poison)))
    loop, queued = run(engine), made[:5]
    for place, each in zip(at, poison, strict=True):
        queued.insert(place, each)
    loop.submit(queued).result(SECONDS)
    wait_for(lambda: ended(causes))
    loop.submit(made[5:]).result(SECONDS)
    wait_for(lambda: ended(received))
    assert texts(received) == plain(7), "later ones too"
    assert all("planted" in str(got[-1].error) and got[-1].finish_reason == "cancelled" for got in causes)
    assert loop.failures == 0
    wait_for(lambda: nothing_is_held(engine))


@pytest.mark.parametrize(("count", "served"), [(4, 3), (6, 0)])
def test_requests_that_fail_together_end_from_the_youngest(
    run: Callable[[Any], EngineLoop], caplog: pytest.LogCaptureFixture, count: int, served: int
) -> None:
    """As many as can run together are served, which may be none; the engine then serves others."""
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(max_rows=4)
    fail_while(engine, lambda: engine.num_running > served)
    made, received = jobs(count)
    loop = run(engine)
    loop.submit(made).result(SECONDS)
    wait_for(lambda: ended(received))
    assert texts(received[:served]) == plain(count)[:served]
    assert all("planted" in str(got[-1].error) for got in received[served:])
    engine.target.before_pass = None
    made, received = jobs(2)
    loop.submit(made).result(SECONDS)
    wait_for(lambda: ended(received))
    assert texts(received) == plain(2)
    wait_for(lambda: nothing_is_held(engine))


def test_jobs_are_queued_together_or_not_at_all(run: Callable[[Any], EngineLoop]) -> None:
    engine = make_engine()
    made, received = jobs(3)
    made[2].prompt = [10**6]
    loop = run(engine)
    with pytest.raises(ValueError, match="token id 1000000"):
        loop.submit(made).result(SECONDS)
    wait_for(lambda: nothing_is_held(engine))
    assert received == [[], [], []]


def test_a_job_that_was_cancelled_before_it_ran_is_left_alone(run: Callable[[Any], EngineLoop]) -> None:
    made, _ = jobs(1)
    loop = run(make_engine())
    loop.cancel(made).result(SECONDS)
    loop.submit(made).result(SECONDS)
    loop.cancel(made).result(SECONDS)
    loop.cancel(made).result(SECONDS)


def test_the_end_of_the_thread_ends_everything(run: Callable[[Any], EngineLoop]) -> None:
    engine = make_engine(max_rows=1)
    made, received = jobs(3)
    loop = run(engine)
    engine.target.before_pass = lambda: wait_for(lambda: loop._stopping)
    loop.submit(made).result(SECONDS)
    loop.stop(SECONDS)
    assert [type(got[-1].error) for got in received] == [EngineStopped] * 3
    with pytest.raises(EngineStopped):
        loop.submit(made).result(SECONDS)


def test_a_dead_thread_is_reported(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    served = start()

    def die() -> None:
        raise SystemExit

    served.target.before_pass = die
    for method in ("GET", "HEAD"):
        assert served.request(method, "/health").status_code == 200
    with pytest.raises(openai.InternalServerError) as failed:
        served.client().completions.create(model="toy", prompt="one")
    assert failed.value.status_code == 503
    wait_for(lambda: served.request("GET", "/health").status_code == 503)
    assert served.request("HEAD", "/health").status_code == 503
    assert served.post("completions", {"prompt": "one"}).status_code == 503
    assert served.post("completions", {"prompt": "one", "stream": True}).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_clients_get_an_error_without_its_cause(start: Start, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    served = start()

    def fail() -> None:
        if any(len(handle.tokens) > 4 for handle in served.engine._running.values()):
            raise RuntimeError("secret")

    served.target.before_pass = fail
    with pytest.raises(openai.APIError, match="failed again and again") as failed:
        made: Any = served.client().completions.create(model="toy", prompt="one", seed=1, stream=stream)
        found = "".join(part.choices[0].text for part in made)
        assert found
    assert "secret" not in str(failed.value)
    served.target.before_pass = None
    assert served.post("completions", {"prompt": "one"}).status_code == 200


@pytest.mark.parametrize("others", [0, 5])
def test_a_request_whose_last_slice_fails_ends_alone(
    run: Callable[[Any], EngineLoop], caplog: pytest.LogCaptureFixture, others: int
) -> None:
    """The slices before it succeed, over and over."""
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(max_rows=4, prefill_chunk=3)
    made, received = jobs(others)
    poison, causes = jobs(1, prompt=(9,) * 10)

    def is_late(job: Job) -> bool:
        return is_running(job) and int(engine.target.cache.lengths[job.handle.row]) >= 6  # type: ignore[union-attr]

    fail_while(engine, lambda: any(map(is_late, poison)))
    loop = run(engine)
    loop.submit([*made[:3], *poison, *made[3:]]).result(SECONDS)
    wait_for(lambda: ended(causes))
    assert "planted" in str(causes[0][-1].error)
    wait_for(lambda: ended(received) and nothing_is_held(engine))
    assert texts(received) == plain(others) and (loop.failures == 0 or not others)


def test_long_prompts_that_fail_together_end_from_the_youngest(
    run: Callable[[Any], EngineLoop], caplog: pytest.LogCaptureFixture
) -> None:
    """Each runs alone, in several slices."""
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(max_rows=4, prefill_chunk=3)
    made, received = jobs(2, prompt=(5,) * 10)
    made[1].prompt[0] = 6  # they share no page
    fail_while(engine, lambda: engine.num_running > 1 and int(engine.target.cache.lengths.max()) >= 6)
    loop = run(engine)
    loop.submit(made).result(SECONDS)
    wait_for(lambda: ended(received) and nothing_is_held(engine))
    assert received[0][-1].error is None and "planted" in str(received[1][-1].error) and loop.failures == 0


def test_a_job_that_leaves_in_its_prefill_frees_its_row_before_the_next_slice(
    run: Callable[[Any], EngineLoop],
) -> None:
    engine, passes, go = make_engine(max_rows=1, prefill_chunk=2), 0, threading.Event()

    def count() -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            assert go.wait(SECONDS)

    engine.target.before_pass = count
    made, received = jobs(1, prompt=(5,) * 200)
    loop = run(engine)
    loop.submit(made).result(SECONDS)
    wait_for(lambda: passes == 3)
    gone = loop.cancel(made)
    go.set()
    gone.result(SECONDS)
    assert passes == 3 and nothing_is_held(engine)
    wait_for(lambda: ended(received))
    assert received[0][-1].finish_reason == "cancelled" and loop.failures == 0

"""Streams that are closed, dropped or interrupted: their requests end and give rows and pages back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import Engine, SamplingParams
from specdec_fast.engine.request import Handle

TOKENIZER = byte_tokenizer()
LONG = SamplingParams(seed=1, max_new_tokens=60, banned_token_ids=tuple(range(128, 266)))


class Hooked(AutomatonTarget):
    """Calls a function while it scores."""

    hook: Callable[[], object] = staticmethod(lambda: None)

    def score(self, *args: Any, **options: Any) -> Any:
        self.hook()
        return super().score(*args, **options)


def engine(rows: int = 2) -> Engine:
    target = Hooked(random_logits(100, len(TOKENIZER), seed=2), page_size=4, max_rows=rows)
    return Engine(target, tokenizer=TOKENIZER)


def begun(made: Engine, **options: Any) -> tuple[Handle, Any]:
    """Returns a request and its stream, of which a piece was read."""
    handle = made.submit([1, 2], LONG)
    pieces = made.stream(handle, **options)
    assert next(pieces)
    return handle, pieces


def check_empty(made: Engine) -> None:
    assert made.idle and made.state.num_free == made.state.max_rows and made.target.cache.pages.num_used == 0


def test_leaving_the_loop_cancels_the_request() -> None:
    made = engine()
    for _ in range(5):
        handle = made.submit([1, 2], LONG)
        for _piece in made.stream(handle):
            break
        assert handle.finish_reason == "cancelled" and handle.text and made.idle
    check_empty(made)
    assert made.stats.new_tokens == 5, "cancelled requests count as ended"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_an_exception_in_the_loop_cancels_the_request(error: type[BaseException]) -> None:
    made = engine()
    handle = made.submit([1, 2], LONG)

    def consume() -> None:
        for _ in made.stream(handle):
            raise error

    with pytest.raises(error):
        consume()
    gc.collect()
    assert handle.finish_reason == "cancelled"
    check_empty(made)


def test_an_interrupt_inside_a_step_cancels_the_request_of_the_loop_alone() -> None:
    made = engine()
    other, handle = made.submit([3, 4], LONG), made.submit([1, 2], LONG)
    calls = iter([None, None, KeyboardInterrupt])

    def interrupt() -> None:
        if (error := next(calls, None)) is not None:
            raise error

    made.target.hook = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        for _ in made.stream(handle):
            pass
    gc.collect()
    assert handle.finish_reason == "cancelled" and not other.finished
    assert "".join(made.stream(other)) == other.text and len(other.tokens) == 60
    check_empty(made)


def test_a_stream_is_closed_by_name_and_by_a_block() -> None:
    made = engine()
    handle, pieces = begun(made)
    pieces.close()
    pieces.close()
    assert handle.finish_reason == "cancelled" and list(pieces) == []
    handle = made.submit([1, 2], LONG)
    with made.stream(handle) as pieces:
        next(pieces)
    assert handle.finish_reason == "cancelled"
    check_empty(made)


def test_a_stream_that_never_began_is_a_stream() -> None:
    made = engine()
    handle = made.submit([1, 2], LONG)
    pieces = made.stream(handle)
    del pieces
    assert handle.finish_reason == "cancelled"
    check_empty(made)


def test_a_stream_in_a_cycle_is_collected() -> None:
    made = engine()
    handle, pieces = begun(made)
    holder: list[Any] = [pieces]
    holder.append(holder)
    del pieces, holder
    assert made.num_running == 1
    gc.collect()
    assert handle.finish_reason == "cancelled"
    check_empty(made)


def test_the_last_of_several_streams_cancels() -> None:
    made = engine()
    handle, first = begun(made)
    second = made.stream(handle)
    first.close()
    assert not handle.finished and next(second)
    second.close()
    assert handle.finish_reason == "cancelled"


def test_a_request_may_outlive_its_stream() -> None:
    made = engine()
    handle, pieces = begun(made, cancel_on_close=False)
    pieces.close()
    assert not handle.finished and made.num_running == 1
    assert "".join(made.stream(handle)) == handle.text and handle.finish_reason == "length"
    check_empty(made)


def test_a_later_stream_of_a_cancelled_request_has_its_text() -> None:
    made = engine()
    handle, pieces = begun(made)
    pieces.close()
    assert "".join(made.stream(handle)) == handle.text != ""


def test_a_stream_that_was_read_to_its_end_cancels_nothing() -> None:
    made = engine()
    handle = made.submit([1, 2], LONG)
    pieces = made.stream(handle)
    assert "".join(pieces) == handle.text and not handle.streams
    pieces.close()
    assert handle.finish_reason == "length"


def test_closing_the_stream_of_another_engine_ends_nothing() -> None:
    made, other = engine(), engine()
    handle = made.submit([1, 2], LONG)
    with pytest.raises(ValueError, match="handle: got request 0 of another engine"), other.stream(handle) as pieces:
        next(pieces)
    assert not handle.finished and not handle.streams


def test_a_stream_dropped_inside_a_step_ends_after_it() -> None:
    """The garbage collector may run anywhere, and the step goes on with the rows that it began with."""
    made = engine()
    handle, pieces = begun(made)
    other = made.submit([3, 4], LONG)
    seen = []

    def drop() -> None:
        holder.clear()
        seen.append((made.num_running, handle.finished))

    holder = [pieces]
    del pieces
    made.target.hook = drop  # type: ignore[attr-defined]
    made.step()
    assert seen == [(2, False)] and handle.finish_reason == "cancelled" and made.num_running == 1
    assert "".join(made.stream(other)) == other.text and len(other.tokens) == 60
    check_empty(made)


def test_a_finalizer_does_not_wait_for_the_step_of_another_thread() -> None:
    """That thread may wait for a lock which this one holds; its step cancels the request at its end."""
    made = engine()
    handle, pieces = begun(made)
    made.submit([3, 4], LONG)
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go_on.wait(30)

    made.target.hook = pause  # type: ignore[attr-defined]
    stepping = threading.Thread(target=made.step, daemon=True)
    stepping.start()
    assert inside.wait(30)
    del pieces
    assert not handle.finished
    go_on.set()
    stepping.join(30)
    assert handle.finish_reason == "cancelled" and made.num_running == 1


def test_a_close_by_name_waits_for_the_step_of_another_thread() -> None:
    made = engine()
    handle, pieces = begun(made)
    made.submit([3, 4], LONG)
    inside, go_on = threading.Event(), threading.Event()
    made.target.hook = lambda: (inside.set(), go_on.wait(30))  # type: ignore[attr-defined]
    stepping = threading.Thread(target=made.step, daemon=True)
    stepping.start()
    assert inside.wait(30)
    threading.Timer(0.05, go_on.set).start()
    pieces.close()
    assert handle.finish_reason == "cancelled"
    stepping.join(30)
    assert not stepping.is_alive() and made.num_running == 1


def test_threads_that_leave_one_request_at_once_cancel_it_once() -> None:
    made = engine()
    for _ in range(10):
        handle = made.submit([1, 2], LONG)
        start = threading.Barrier(4)

        def client(handle: Handle = handle, start: threading.Barrier = start) -> None:
            pieces = made.stream(handle)
            start.wait(30)
            next(pieces, None)
            pieces.close()

        threads = [threading.Thread(target=client, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert handle.finish_reason == "cancelled" and not handle.streams
    check_empty(made)


def test_a_cancellation_that_fails_concerns_no_other_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine()
    handle, pieces = begun(made)
    other = made.submit([3, 4], LONG)

    def broken(handle: Handle) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(made, "cancel", broken)
        pieces.close()
    assert f"request {handle.request_id}: it could not be cancelled cleanly" in caplog.text
    assert made.step() == [handle, other]

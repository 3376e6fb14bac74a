"""The end of a server: running texts finish, or end with an error when they take too long."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from oracles.toy_server import Running, make_engine, nothing_is_held, wait_for

Start = Callable[..., Running]
EXTRA = {"ignore_eos": True}


def slow(length: int = 4096) -> Any:
    engine = make_engine(max_rows=1, max_length=length)
    engine.target.before_pass = lambda: time.sleep(0.005)
    return engine


def test_running_and_waiting_texts_finish(start: Start) -> None:
    served = start(slow(), shutdown_timeout=20)
    client = served.client()
    options: dict[str, Any] = {"model": "toy", "prompt": "one", "max_tokens": 60, "seed": 1, "extra_body": EXTRA}
    stream = client.completions.create(**options, stream=True)
    whole: list[str] = []
    waiting = threading.Thread(target=lambda: whole.append(client.completions.create(**options).choices[0].text))
    waiting.start()
    wait_for(lambda: served.engine.num_queued == 1)
    served.server.should_exit = True
    streamed = "".join(part.choices[0].text for part in stream)
    waiting.join()
    assert whole == [streamed] and len(streamed) >= 60
    served.stop()
    with pytest.raises(httpx.ConnectError):
        served.post("completions", {"prompt": "one"})


def test_texts_that_take_too_long_end_with_an_error(start: Start) -> None:
    served = start(slow(), shutdown_timeout=0.2)
    client = served.client()
    options: dict[str, Any] = {"model": "toy", "prompt": "one", "max_tokens": 4000, "extra_body": EXTRA}
    stream = client.completions.create(**options, stream=True)
    failed: list[Exception] = []

    def wait() -> None:
        try:
            client.completions.create(**options)
        except openai.APIStatusError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: served.engine.num_queued == 1)
    served.server.should_exit = True
    with pytest.raises(openai.APIError, match="shuts down"):
        assert [part.choices[0].text for part in stream]
    waiting.join()
    assert isinstance(failed[0], openai.APIStatusError) and failed[0].status_code == 503
    served.stop()
    assert nothing_is_held(served.engine)


def test_a_reader_that_stands_still_does_not_hold_the_server(start: Start) -> None:
    served = start(make_engine(max_length=1024), shutdown_timeout=0.1, sndbuf=4096)
    body = json.dumps({"prompt": "one", "max_tokens": 900, "stream": True, "logprobs": 20, **EXTRA}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as still:
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        still.connect(("127.0.0.1", int(served.address.rpartition(":")[2])))
        still.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: served.engine.num_running == 1)
        served.stop()
        assert nothing_is_held(served.engine)

"""Many clients at once, clients that leave or read slowly: every text is right, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from oracles.toy_server import SECONDS, Running, make_engine, nothing_is_held, wait_for

from specdec_fast import SamplingParams

Start = Callable[..., Running]
PROMPTS = ["one", "the thing", "another", "in the end", "x"]


def job(seed: int, length: int = 30) -> tuple[str, SamplingParams]:
    greedy = seed % 5 == 0
    prompt = PROMPTS[seed % len(PROMPTS)] + str(seed % 7)
    return prompt, SamplingParams(seed=seed, max_new_tokens=length, temperature=0.0 if greedy else 1.0)


def expected(seeds: range, length: int = 30) -> list[str]:
    prompts, params = zip(*(job(seed, length) for seed in seeds))
    return [handle.text for handle in make_engine(drafter=None).generate(prompts, params)]


def body(seed: int, length: int = 30, **more: Any) -> dict[str, Any]:
    prompt, params = job(seed, length)
    return {"prompt": prompt, "seed": seed, "max_tokens": length, "temperature": params.temperature, **more}


async def read_stream(client: httpx.AsyncClient, request: dict[str, Any], most: int | None = None) -> str:
    """Reads a stream, or its first `most` events, after which it leaves."""
    text, events = "", 0
    async with client.stream("POST", "/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            events += 1
            if events == most:
                return text
    return text


def client_of(served: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"{served.address}/v1", limits=limits, timeout=SECONDS, verify=False)


def test_64_streams_at_once(start: Start) -> None:
    served, seeds = start(make_engine(max_rows=8)), range(64)

    async def everyone() -> list[str]:
        async with client_of(served) as client:
            return await asyncio.gather(*(read_stream(client, body(seed)) for seed in seeds))

    assert asyncio.run(everyone()) == expected(seeds)
    wait_for(lambda: nothing_is_held(served.engine))


def test_random_requests_with_cancels(start: Start) -> None:
    """Streams and whole answers, some of which are left early: the others have their own texts."""
    served, rng, seeds = start(make_engine(max_rows=8), max_queue=200), random.Random(3), range(150)
    plans = [rng.choice(("stream", "whole", "leave", "leave whole")) for _ in seeds]

    async def one(client: httpx.AsyncClient, seed: int, gate: asyncio.Semaphore) -> str | None:
        async with gate:
            plan, request = plans[seed], body(seed)
            if plan == "stream":
                return await read_stream(client, request)
            if plan == "leave":
                await read_stream(client, request, most=rng.randrange(1, 4))
            elif plan == "whole":
                answer = await client.post("/completions", json=request)
                return answer.json()["choices"][0]["text"]
            else:
                with pytest.raises(httpx.TimeoutException):
                    wait = httpx.Timeout(SECONDS, read=0.002)
                    await client.post("/completions", json={**request, "max_tokens": 200}, timeout=wait)
            return None

    async def everyone() -> list[str | None]:
        gate = asyncio.Semaphore(40)
        async with client_of(served) as client:
            return await asyncio.gather(*(one(client, seed, gate) for seed in seeds))

    for plan, found, text in zip(plans, asyncio.run(everyone()), expected(seeds)):
        assert found == (None if plan.startswith("leave") else text)
    wait_for(lambda: nothing_is_held(served.engine))


def slowly(served: Running) -> None:
    """Makes every pass take a while, so that a text is far from its end when its client leaves."""
    served.target.before_pass = lambda: time.sleep(0.003)


def cancelled(served: Running) -> bool:
    return 'specdec_texts_total{finish_reason="cancelled"}' in served.request("GET", "/metrics").text


KILLED = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
body = {"prompt": "one", "max_tokens": 4000, "ignore_eos": True, "stream": sys.argv[2] == "stream"}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
print("sent", flush=True)
answer = connection.getresponse()
while answer.read1(100):
    pass
"""


@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_a_killed_client_frees_its_row(start: Start, kind: str) -> None:
    served = start(make_engine(max_rows=2, max_length=4096))
    slowly(served)
    port = served.address.rpartition(":")[2]
    process = subprocess.Popen([sys.executable, "-c", KILLED, port, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"sent\n"
    wait_for(lambda: served.engine.num_running == 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for(lambda: nothing_is_held(served.engine))
    assert cancelled(served)


def test_a_client_that_leaves_in_a_long_prefill_frees_its_row(start: Start) -> None:
    """Within one slice. A stream beside it gets its text meanwhile."""
    served = start(make_engine(max_rows=2, max_length=4096, prefill_chunk=4))
    slowly(served)
    engine = served.engine
    running = served.client().completions.create(
        model="toy", prompt="one", seed=1, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = iter(running)
    next(pieces)
    with pytest.raises(httpx.TimeoutException):
        served.post("completions", {"prompt": [5] * 3000, "max_tokens": 5}, timeout=0.3)
    sent = sum(len(handle.tokens) for handle in engine._running.values())
    wait_for(lambda: engine.num_running == 1)
    assert served.target.cache.lengths.max() < 3000 and sent > 20 and next(pieces)
    running.close()
    wait_for(lambda: nothing_is_held(engine))
    assert cancelled(served)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_that_leaves_while_it_waits_never_runs(start: Start, path: str) -> None:
    served = start(make_engine(max_rows=1, max_length=4096))
    slowly(served)
    running = served.client().completions.create(
        model="toy", prompt="one", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    request: dict[str, Any] = (
        {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    with pytest.raises(httpx.TimeoutException):
        served.post(path, request, timeout=0.3)
    wait_for(lambda: served.engine.num_queued == 0)
    assert served.engine.num_running == 1
    running.close()
    wait_for(lambda: nothing_is_held(served.engine))


def test_a_slow_reader_stops_no_other(start: Start) -> None:
    """Its text waits in the server, in few pieces, and its row is free long before it reads."""
    length = 600
    served = start(make_engine(max_rows=2, max_length=1024), sndbuf=4096)
    request = json.dumps(body(3, length, stream=True, logprobs=20, ignore_eos=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(served.address.rpartition(":")[2])))
        slow.sendall(head + f"Content-Length: {len(request)}\r\n\r\n".encode() + request)
        wait_for(lambda: served.engine.num_running == 1)
        assert served.post("completions", body(4)).json()["choices"][0]["text"] == expected(range(4, 5))[0]
        wait_for(lambda: nothing_is_held(served.engine))
        slow.settimeout(SECONDS)
        received = b""
        while more := slow.recv(65536):
            received += more
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    (whole,) = make_engine(drafter=None, max_length=1024).generate(
        [job(3)[0]], SamplingParams(seed=3, max_new_tokens=length, ignore_eos=True)
    )
    assert "".join(choice["text"] for choice in choices) == whole.text
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == length
    assert len(choices) < length / 2 and max(len(choice["logprobs"]["tokens"]) for choice in choices) > 50


def test_a_stream_ends_at_stop_strings(served: Running) -> None:
    """No piece has a character that the stop string takes away again."""
    (text,) = expected(range(1, 2))
    stop = text[9:12]
    parts = list(
        served.client().completions.create(
            model="toy", prompt=job(1)[0], seed=1, max_tokens=30, stop=["never", stop], stream=True
        )
    )
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_proxies_are_asked_not_to_hold_events_back(start: Start) -> None:
    headers = start().post("completions", {"prompt": "one", "stream": True}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"

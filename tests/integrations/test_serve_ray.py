"""Two replicas behind Ray Serve: one is killed in the middle, and all texts are those of a single engine.

`make lane-ray` runs it, in an environment of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_fast import SamplingParams, load

ray = pytest.importorskip("ray", reason="needs the extra ray; make lane-ray has it")
httpx = pytest.importorskip("httpx")
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_ray.py"
REQUESTS = [
    {
        "prompt": ("And the king said", "In the beginning")[at % 2],
        "seed": at,
        "max_new_tokens": 60,
        "stream": at % 4 > 1,
    }
    for at in range(20)
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Any]]:
    """The address, and a handle of the replicas."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # of busy machines
    example = runpy.run_path(str(EXAMPLE))
    try:
        yield f"http://127.0.0.1:{port}", example["start"](port=port)
    finally:
        ray.serve.shutdown()
        ray.shutdown()


def replicas(handle: Any) -> set[int]:
    """Process ids of both replicas."""
    found: set[int] = set()
    end = time.monotonic() + 60
    while len(found) < 2:
        assert time.monotonic() < end
        found.add(handle.state.remote().result()["process_id"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_replica_loses_no_text(served: tuple[str, Any]) -> None:
    address, handle = served
    before, texts, pieces = replicas(handle), [""] * len(REQUESTS), [0] * len(REQUESTS)

    def ask(at: int) -> None:
        with httpx.stream("POST", address, json=REQUESTS[at], timeout=300) as answer:
            for piece in answer.iter_text():
                texts[at], pieces[at] = texts[at] + piece, pieces[at] + 1

    threads = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(len(REQUESTS))]
    for each in threads:
        each.start()
    streamed = [at for at, each in enumerate(REQUESTS) if each["stream"]]
    while sum(pieces[at] > 2 for at in streamed) < 5:  # streams of both replicas have begun
        time.sleep(0.01)
    os.kill(min(before), signal.SIGKILL)
    cut = [at for at in range(len(REQUESTS)) if threads[at].is_alive()]
    for each in threads:
        each.join(300)
        assert not each.is_alive()
    assert len(cut) > 5 and len(set(cut) & set(streamed)) > 2
    engine = load("demo-target", drafter="none")
    params = [SamplingParams(seed=each["seed"], max_new_tokens=60) for each in REQUESTS]
    wanted = [each.text for each in engine.generate([str(each["prompt"]) for each in REQUESTS], params)]
    found = [
        text if each["stream"] else httpx.Response(200, text=text).json()["text"] for each, text in zip(REQUESTS, texts)
    ]
    assert found == wanted
    assert replicas(handle) != before  # another replica has taken its place


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_unseeded_requests_get_a_seed(served: tuple[str, Any]) -> None:
    address, _ = served
    first = httpx.post(address, json={"prompt": "In the beginning", "max_new_tokens": 9}, timeout=60).json()
    again = {"prompt": "In the beginning", "max_new_tokens": 9, "seed": first["seed"]}
    assert httpx.post(address, json=again, timeout=60).json() == first


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_token": 4}, "max_token"),
        ({"prompt": "a " * 5000}, "context limit of 2048"),
        ({"prompt": ["a"]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "stream": "no"}, "stream: got 'no'"),
    ],
)
def test_wrong_requests_get_an_answer(served: tuple[str, Any], body: dict[str, Any], words: str, stream: bool) -> None:
    answer = httpx.post(served[0], json={"stream": stream, **body}, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]
    assert "Traceback" not in answer.text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_body_that_is_not_json_gets_an_answer(served: tuple[str, Any]) -> None:
    answer = httpx.post(served[0], content=b"{", timeout=60)
    assert answer.status_code == 400 and "expected {" in answer.json()["error"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_text_that_cannot_end_is_no_success(served: tuple[str, Any]) -> None:
    """After its first token no token is left, which the engine finds while it decodes."""
    body = {"prompt": "a", "allowed_token_ids": [5], "no_repeat_ngram_size": 1, "max_new_tokens": 9}
    answer = httpx.post(served[0], json=body, timeout=60)
    assert answer.status_code == 500


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_requests_of_clients_that_leave_end(served: tuple[str, Any]) -> None:
    """They end long before their last token."""
    address, handle = served

    def states() -> dict[int, Any]:
        """The states of both replicas."""
        found: dict[int, Any] = {}
        while len(found) < 2:
            state = handle.state.remote().result()
            found[state["process_id"]] = state
        return found

    before = sum(each["tokens"] for each in states().values())
    for at in range(4):
        body = {"prompt": "In the beginning", "seed": at, "max_new_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", address, json=body, timeout=60) as answer:
            next(answer.iter_text())
    end = time.monotonic() + 60
    while not all(each["idle"] for each in states().values()):
        assert time.monotonic() < end, "a request goes on although its client has left"
        time.sleep(0.05)
    assert sum(each["tokens"] for each in states().values()) - before < 4 * 1500 / 2
    again = httpx.post(address, json={"prompt": "In the beginning", "seed": 1, "max_new_tokens": 5}, timeout=60)
    assert again.status_code == 200 and again.json()["text"]

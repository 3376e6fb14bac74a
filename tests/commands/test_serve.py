"""`specdec serve` as a program: its address, its key, its end, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import httpx
import pytest
from typer.testing import Result

Serve = Callable[..., tuple[BaseProcess, str, list[str]]]


@pytest.fixture
def serve(forked: Callable[..., tuple[BaseProcess, BinaryIO]], pair: list[str], tmp_path: Path) -> Iterator[Serve]:
    """Starts a server: (the process, its address, what it said)."""
    started: list[tuple[BaseProcess, BinaryIO]] = []

    def begin(*options: str) -> tuple[BaseProcess, str, list[str]]:
        errors = tmp_path / f"errors{len(started)}"
        started.append(forked("serve", *pair, "--port", "0", *options, errors=errors))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            said = errors.read_text() if errors.exists() else ""
            if found := re.search(r"serving (\S+) on (http://\S+)/v1;", said):
                return started[-1][0], found[2], [found[1], said]
            assert started[-1][0].is_alive(), said
            time.sleep(0.05)
        raise AssertionError("it never started")

    yield begin
    for process, output in started:
        process.kill()
        process.join()
        output.close()


def ask(address: str, **options: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {options['key']}"} if "key" in options else {}
    body = {"prompt": "one", "max_tokens": 5, "seed": 1}
    return httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_and_ends(serve: Serve, pair: list[str], tmp_path: Path, end: signal.Signals) -> None:
    process, address, said = serve("--threads", "1", "--max-length", "64")
    assert address.startswith("http://127.0.0.1:") and said[0] == pair[1]
    answer = ask(address).json()
    assert answer["usage"]["completion_tokens"] == 5 and answer["model"] == pair[1]
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["max_model_len"] == 64
    assert process.pid is not None
    os.kill(process.pid, end)
    process.join(30)
    assert process.exitcode == 0
    said = (tmp_path / "errors0").read_text()
    assert said.endswith("specdec: the server has ended\n") and "Traceback" not in said


def test_a_second_interrupt_ends_texts_at_once_without_a_traceback(serve: Serve, tmp_path: Path) -> None:
    process, address, _ = serve("--threads", "1")
    body = {"prompt": "one", "max_tokens": 2000, "n": 8, "ignore_eos": True, "stream": True}
    errors, end = tmp_path / "errors0", time.monotonic() + 20
    assert process.pid is not None
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as stream:
        assert stream.status_code == 200, stream.read()
        lines = stream.iter_lines()  # without a name it would be closed, and the connection with it
        next(lines)
        os.kill(process.pid, signal.SIGINT)
        while "finishing" not in errors.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
    assert process.exitcode == 130, errors.read_text()
    said = [line for line in errors.read_text().splitlines() if "warning: drafter" not in line][-2:]
    assert said == ["specdec: finishing 8 texts, at most 30 s; Ctrl-C again ends at once", "specdec: interrupted"]
    assert "Traceback" not in errors.read_text()


def test_the_key_comes_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_API_KEY", "hunter2")
    _, address, (name, said) = serve("--host", "0.0.0.0", "--served-model-name", "mine")
    assert name == "mine" and "no key" not in said
    local = address.replace("0.0.0.0", "127.0.0.1")
    assert ask(local).status_code == 401
    assert ask(local, key="hunter2").json()["model"] == "mine"


def test_an_open_server_without_a_key_warns(serve: Serve) -> None:
    _, _, (_, said) = serve("--host", "0.0.0.0")
    assert "no key protects it" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "no such host"], "expected a free address"),
        (["--host", "192.0.2.1"], "expected a free address"),
        (["--api-key", ""], "api_key: got an empty"),
        (["--served-model-name", "", "--port", "0"], "expected a name"),
        (["--drafter", "nothing"], "--drafter"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    run: Callable[..., Result], options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_fast.commands import open_engine

    monkeypatch.setattr(open_engine, "open_engine", lambda *_, **__: pytest.fail("a model was loaded first"))
    result = run("serve", *options)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_several_processes_of_torchrun_are_refused(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    result = run("serve", "--port", "0")
    assert result.exit_code == 2 and "got 2 processes of torchrun; expected one" in result.stderr


def test_a_port_in_use_is_refused(run: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", "--port", str(other.getsockname()[1]))
    assert result.exit_code == 2 and "in use" in result.stderr and "expected a free address" in result.stderr


def test_a_model_without_a_tokenizer_is_refused(run: Callable[..., Result], models: dict[str, str]) -> None:
    result = run("serve", "--model", models["bare"], "--port", "0")
    assert result.exit_code == 2 and "tokenizer" in result.stderr

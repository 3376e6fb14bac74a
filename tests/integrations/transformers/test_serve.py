"""`transformers serve --trust-remote-code` over a model whose folder has `custom_generate/`: a real process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.transformers.conftest import TARGET, TEXTS

from specdec_fast import SamplingParams, load
from specdec_fast.integrations.transformers import write_custom_generate

TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
TRACE = """
from specdec_fast.engine.engine import Engine
step = Engine.step
def traced(self, *args, **more):
    found = step(self, *args, **more)
    with open({path!r}, "a") as file:
        print(self.drafter.name, len(found), file=file)
    return found
Engine.step = traced
"""


def missing() -> str | None:
    """What `transformers serve` lacks here, or None."""
    from transformers.utils.import_utils import is_serve_available

    return None if is_serve_available() else "transformers[serving] is not installed"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """Address, model folder and trace of a server. It ends with the module."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("serve")
    model, trace = place / "model", place / "steps.txt"
    shutil.copytree(TARGET, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = None  # texts are as long as requests say
    (model / "generation_config.json").write_text(json.dumps(settings))
    folder = write_custom_generate(model, draft="demo-draft", num_draft_tokens=3)
    program = folder / "generate.py"  # whose engine tells that it decodes
    program.write_text(program.read_text() + TRACE.format(path=str(trace)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(model)]
    command += ["--trust-remote-code", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    own = {"HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (place / "log.txt").open("w") as log:
        server = subprocess.Popen([*command, "--dtype", "float32"], env={**os.environ, **own}, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None:
                pytest.fail((place / "log.txt").read_text()[-2000:])
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", model, trace
    finally:
        server.terminate()
        server.wait(30)


def stream(address: str, model: Path, text: str, **more: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed chat request."""
    import httpx

    body = {"model": str(model), "messages": [{"role": "user", "content": text}], "stream": True, **more}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_of(events: Any) -> str:
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event.get("choices")]
    return "".join(piece for piece in pieces if piece)


@pytest.mark.slow
def test_chat_requests_are_streamed_speculatively(served: tuple[str, Path, Path]) -> None:
    import httpx

    address, model, trace = served
    with load("demo-target") as engine:
        handles = engine.generate(TEXTS[:2], SamplingParams(temperature=0, max_new_tokens=24))
    for text, handle in zip(TEXTS[:2], handles, strict=True):
        assert text_of(stream(address, model, text, temperature=0, max_tokens=24)) == handle.text
    steps = trace.read_text().split("\n")
    assert steps[0] == "draft_model 1"
    assert len(steps) < 2 * 24, "the server decodes one token per step"
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": TEXTS[0]}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == handles[0].text


@pytest.mark.slow
def test_the_text_of_a_client_that_leaves_ends(served: tuple[str, Path, Path]) -> None:
    address, model, trace = served

    def steps_so_far() -> int:
        return len(trace.read_text().splitlines()) if trace.exists() else 0

    before = steps_so_far()
    events = stream(address, model, TEXTS[0], temperature=0.7, max_tokens=1500)
    while steps_so_far() == before:  # the first event can come before the first step
        next(events)
    events.close()
    readings = [-1, -2, -3]
    while len({*readings[-3:]}) > 1:
        readings.append(steps_so_far() - before)
        time.sleep(1)
    assert 0 < readings[-1] < 1500 / 4 / 2, "the text went on without its client: a step has four tokens at most"
    assert text_of(stream(address, model, TEXTS[1], temperature=0, max_tokens=8))

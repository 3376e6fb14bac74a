"""Servers in a thread of the test process, over an automaton with a chat template."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from oracles.automaton import AutomatonTarget, random_logits
from oracles.toy_chat import chat_tokenizer
from specdec_fast import Engine
from specdec_fast.drafters.ngram import NgramDrafter
from specdec_fast.server.generation import Service
from specdec_fast.server.settings import Settings
from specdec_fast.server.uvicorn_server import Server, bind, url

TOKENIZER = chat_tokenizer()
SECONDS = 30
"""Most seconds that a test waits for anything."""
HTTP = httpx.Client(verify=False, timeout=SECONDS)
"""One client for all tests, since every new one reads the certificates of the machine."""


def make_engine(max_rows: int = 8, max_length: int = 256, drafter: Any = "ngram", **options: Any) -> Engine:
    """An engine whose texts are printable, of an automaton that depends on the whole prefix."""
    logits = random_logits(50, len(TOKENIZER), seed=2)
    logits[:, 0x7F - 33 : 256] -= 12.0  # bytes that are no characters
    logits[:, TOKENIZER.all_special_ids] -= 12.0
    target = AutomatonTarget(logits, max_rows=max_rows, max_length=max_length, page_size=4)
    made = NgramDrafter(num_draft_tokens=4) if drafter == "ngram" else drafter
    eos = [TOKENIZER.convert_tokens_to_ids("<end>")]
    return Engine(target, made, tokenizer=TOKENIZER, eos_token_ids=eos, **options)


@dataclass
class Running:
    """A server in a thread."""

    address: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def target(self) -> Any:
        return self.engine.target

    def client(self, **options: Any) -> OpenAI:
        """The client of OpenAI, without repeated tries."""
        own = {"base_url": f"{self.address}/v1", "api_key": "none", "max_retries": 0, "http_client": HTTP}
        return OpenAI(**{**own, **options})

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return HTTP.request(method, self.address + path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", f"/v1/{path}", json=body, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def nothing_is_held(engine: Engine) -> bool:
    """Whether no row and no page is in use."""
    return engine.idle and engine.state.num_free == engine.state.max_rows and engine.target.cache.pages.num_used == 0


def start_server(engine: Engine, *, shutdown_timeout: float = 5, sndbuf: int = 0, **settings: Any) -> Running:
    """Starts a server on a free port. `sndbuf` limits the send buffer of its connections."""
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    if sndbuf:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)  # connections inherit it
    service = Service(engine, Settings(**{"model_name": "toy", **settings}))
    server = Server(service, shutdown_timeout=shutdown_timeout, started=ready.set)
    thread = threading.Thread(target=server.serve_until_stopped, args=([bound],), daemon=True)
    thread.start()
    assert ready.wait(SECONDS)
    return Running(url(bound), service, server, thread)

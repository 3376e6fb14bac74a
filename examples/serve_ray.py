"""Several engines behind one address, by Ray Serve. A replica that dies costs nothing but the time of its requests.

Every request has a seed before its first try, so another replica continues its text where the dead one stopped. Needs
the extra `ray`. `python examples/serve_ray.py --stay` serves until Ctrl-C; without the option it answers two requests.

    curl -N localhost:8000 -d '{"prompt": "In the beginning", "seed": 7, "stream": true}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from specdec_fast import SamplingParams, load

TRIES = 5
"""Replicas that a request may lose before it fails."""


class Texts:
    """A replica: an engine, whose requests share every step."""

    def __init__(self, model: str, draft: str | None, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.engine = load(model, draft)

    async def stream(self, prompt: str, params: SamplingParams) -> AsyncIterator[str]:
        """Yields the text of a request in pieces. Leaving it cancels the request."""
        handle = self.engine.submit(prompt, params)
        with self.engine.stream(handle) as pieces:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        if handle.finish_reason in ("error", "cancelled"):
            raise RuntimeError(f"the text has no end: {handle.error or handle.finish_reason}")

    async def state(self) -> dict[str, Any]:
        """Returns the replica's process id, whether it has no request, and how many tokens it has written."""
        written = self.engine.stats.new_tokens
        return {"process_id": os.getpid(), "idle": self.engine.idle, "tokens": written}


def read(body: bytes) -> tuple[str, bool, SamplingParams]:
    """Reads a request: its prompt, whether it wants pieces, and its parameters, with one seed for all tries."""
    try:
        options = json.loads(body)
    except ValueError:
        options = None
    if not isinstance(options, dict) or not isinstance(options.get("prompt"), str):
        raise ValueError(
            'body: got no JSON object with a text as its "prompt"; expected {"prompt": "...", ...}, by POST'
        )
    prompt, streams = options.pop("prompt"), options.pop("stream", False)
    if not isinstance(streams, bool):
        raise ValueError(f"stream: got {streams!r}; expected true or false")
    return prompt, streams, SamplingParams(**options).with_seed()


async def joined(first: str, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yields the first piece of a text, then the others."""
    yield first
    async for piece in pieces:
        yield piece


class Front:
    """What clients talk to. It sends a request to another replica if its replica dies."""

    def __init__(self, texts: Any) -> None:
        self.texts = texts.options(stream=True, method_name="stream")

    async def __call__(self, request: Request) -> Response:
        try:
            prompt, streams, params = read(await request.body())
            pieces = self.stream(prompt, params)
            first = await anext(pieces, "")  # the engine has accepted the request
        except (TypeError, ValueError) as error:
            return JSONResponse({"error": str(getattr(error, "cause", error))}, status_code=400)
        if streams:
            return StreamingResponse(joined(first, pieces), media_type="text/plain; charset=utf-8")
        text = "".join([piece async for piece in joined(first, pieces)])
        return JSONResponse({"text": text, "seed": params.seed})

    async def stream(self, prompt: str, params: SamplingParams) -> AsyncIterator[str]:
        """Yields a text once, whatever happens to replicas: a new try begins with what was yielded before."""
        shown = 0
        for left in reversed(range(TRIES)):
            length = 0
            try:
                async for piece in self.texts.remote(prompt, params):
                    fresh, length = piece[max(shown - length, 0) :], length + len(piece)
                    if fresh:
                        shown = length
                        yield fresh
                return
            except ray.exceptions.RayActorError:  # the replica died; errors of the engine are other ones
                if not left:
                    raise


def start(
    model: str = "demo-target",
    draft: str | None = "demo-draft",
    *,
    replicas: int = 2,
    threads: int = 1,
    port: int = 8000,
) -> Any:
    """Starts the replicas on this machine, reachable from it alone. Returns a handle of the replicas."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    own = {"num_cpus": 0.1}  # on GPUs {"num_gpus": 1}, and load(..., device="cuda")
    texts = serve.deployment(Texts, num_replicas=replicas, ray_actor_options=own, max_ongoing_requests=8)
    front = serve.deployment(Front, ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100)
    serve.run(front.bind(texts.bind(model, draft, threads)), name="texts")
    return serve.get_deployment_handle("Texts", "texts")


def main() -> None:
    import httpx

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        start(port=given.port)
        address = f"http://127.0.0.1:{given.port}"
        print(f"2 replicas answer at {address}")
        request = {"prompt": "In the beginning", "seed": 7, "max_new_tokens": 32}
        whole = httpx.post(address, json=request, timeout=60).json()["text"]
        with httpx.stream("POST", address, json={**request, "stream": True}, timeout=60) as streamed:
            print("streamed and whole text are equal:", "".join(streamed.iter_text()) == whole)
        print(whole)
        while given.stay:
            time.sleep(1)
    except KeyboardInterrupt:
        print("stopping")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

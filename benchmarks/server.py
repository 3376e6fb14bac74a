"""The HTTP server against its engine: speed of the same texts, and a stress run with clients that leave.

    python -m benchmarks.server overhead                                     # the bundled pair
    python -m benchmarks.server overhead --model FOLDER --drafter ngram
    python -m benchmarks.server stress --requests 1000

Server, engine and clients share one process, so the cost of a client counts against the server. Rows are added to the
result file; a row of the same name is replaced.
Tests: tests/benchmarks/test_server.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import httpx
import torch

from benchmarks.end_to_end import workload
from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import read_rows, write_whole
from specdec_fast import Engine, SamplingParams, load
from specdec_fast.server import Settings, serving

RESULTS = Path(__file__).parent / "results" / "server_cpu.json"
CLOCKS = {"wall": perf_counter, "cpu": process_time}
AT_ONCE = 48
"""Clients of the stress run at the same time; more than the rows, so that some wait."""


def post(address: str, body: dict[str, Any]) -> bytes:
    """Sends a request and reads its whole answer, with the least work that a client can do."""
    connection = HTTPConnection(address.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    return answer


def overhead(
    engine: Engine, prompts: list[list[int]], *, tokens: int, rounds: int, streams: int, clock: str = "wall"
) -> dict[str, Any]:
    """Times the same texts from the engine and through the server, `streams` of them at a time."""
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    groups = [prompts[at : at + streams] for at in range(0, len(prompts), streams)]
    body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}

    with serving(engine, Settings("model")) as address, ThreadPoolExecutor(streams) as clients:

        def served(stream: bool) -> None:
            for group in groups:
                list(clients.map(lambda each: post(address, {**body, "prompt": each, "stream": stream}), group))

        def direct() -> None:
            for group in groups:
                engine.generate(group, params)

        sides = {"engine": direct, "stream": lambda: served(True), "whole": lambda: served(False)}
        timing = interleave(sides, rounds, CLOCKS[clock])
    row: dict[str, Any] = {"streams": streams, "texts": len(prompts), "tokens": tokens, "rounds": rounds}
    row["clock"] = clock
    row["engine_tokens_per_s"] = round(len(prompts) * tokens / timing.median("engine"), 1)
    row["tau"] = round(engine.stats.tau, 2)
    for side in ("stream", "whole"):
        row[f"{side}_vs_engine"] = round(timing.ratio("engine", side), 3)
        row[f"{side}_vs_engine_spread"] = [round(each, 3) for each in timing.spread("engine", side)]
    return row


def resident_mib() -> float:
    """Returns the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def stress(engine: Engine, prompts: list[list[int]], *, requests: int, seed: int = 0) -> dict[str, Any]:
    """Sends random requests, many at once. Clients read streams or whole answers, or leave early."""
    lengths = [8 + 8 * (at % 5) for at in range(len(prompts))]
    params = [SamplingParams(seed=at, max_new_tokens=length) for at, length in enumerate(lengths)]
    expected = [handle.text for handle in engine.generate(prompts, params, num_draft_tokens=0)]
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    memory: list[float] = []

    def count(outcome: str) -> None:
        counts[outcome] += 1
        if sum(counts.values()) % (requests // 10 or 1) == 0:
            memory.append(resident_mib())

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore) -> None:
        at, kind, leaves = rng.randrange(len(prompts)), rng.choice(("stream", "whole")), rng.random() < 0.4
        body = {"prompt": prompts[at], "seed": at, "max_tokens": lengths[at], "stream": kind == "stream"}
        async with gate:
            if leaves:
                body |= {"max_tokens": 600, "ignore_eos": True}
                try:
                    await asyncio.wait_for(client.post("/completions", json=body), rng.choice((0.02, 0.2, 1.0)))
                    count(f"{kind}, ended before its client left")
                except asyncio.TimeoutError:
                    count(f"{kind}, left early")
                return
            answer = await client.post("/completions", json=body)
        if kind == "whole":
            text = answer.json()["choices"][0]["text"]
        else:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        count(f"{kind}, {'right' if text == expected[at] else 'wrong'}")

    async def all_of_them(address: str) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=f"{address}/v1", limits=limits, timeout=600) as client:
            await asyncio.gather(*(one(client, gate) for _ in range(requests)))

    start = perf_counter()
    with serving(engine, Settings("model", max_queue=4 * AT_ONCE)) as address:
        asyncio.run(all_of_them(address))
    cache: Any = engine.target.cache
    return {
        "requests": requests,
        "at_once": AT_ONCE,
        "seconds": round(perf_counter() - start, 1),
        "outcomes": dict(sorted(counts.items())),
        "pages_in_use_after": cache.pages.num_used,
        "rows_in_use_after": engine.state.max_rows - engine.state.num_free,
        "resident_mib": [round(each) for each in memory],
    }


def record(row: dict[str, Any], out: Path) -> None:
    """Adds a row to the result file, or replaces the one of that name."""
    rows = [each for each in read_rows(out) if each["name"] != row["name"]] + [row]
    write_whole(out, {"environment": environment(), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "stress"))
    parser.add_argument("--model", default="demo-target")
    parser.add_argument("--name", help="name of the model in the result file")
    parser.add_argument("--drafter", help="default: the bundled draft model")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time of all threads")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draft = None if options.drafter else "demo-draft"
    engine = load(options.model, draft, drafter=options.drafter, max_length=1024)
    name = f"{options.name or options.model}, {options.drafter or 'draft_model'}"
    if options.what == "overhead":
        texts = workload(engine.tokenizer, options.texts)
        numbers = {"rounds": options.rounds, "streams": options.streams, "clock": options.clock}
        row = overhead(engine, texts, tokens=options.tokens, **numbers)
        row = {"name": f"overhead, {name}, {options.streams} at once, {options.clock}", **row}
    else:
        row = {"name": f"stress, {name}", **stress(engine, workload(engine.tokenizer, 40), requests=options.requests)}
    print(json.dumps(row, indent=1))
    record(row, options.out)


if __name__ == "__main__":
    main()

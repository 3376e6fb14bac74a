"""Drafters that need no draft model beside plain decoding, interleaved in one run: jacobi, lookahead, layer_skip.

`python -m benchmarks.parallel` measures all of them on the bundled target, prints a table and writes a result file (in
benchmarks/results) after every row. The text of every row is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.end_to_end import distinct_4, workload
from benchmarks.interleave import environment, interleave
from specdec_fast import SamplingParams, load

RESULTS = Path(__file__).parent / "results"
SMALL = {"window": 3, "ngram": 3, "guesses": 3}
MIDDLE = list(range(3, 9))  # of twelve layers
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jacobi": ("jacobi", {}),
    "jacobi, blocks of 4": ("jacobi", {"block": 4}),
    "lookahead W7 N5 G7": ("lookahead", {}),
    "lookahead W3 N3 G3": ("lookahead", {"window": 3, "ngram": 3, "guesses": 3}),
    "lookahead W3 N3 G3, own n-grams": (
        "lookahead",
        {"window": 3, "ngram": 3, "guesses": 3, "pool_from_prompt": False},
    ),
    "layer_skip, middle half": ("layer_skip", {"exit_after": None}),
    "layer_skip, exit after 4": ("layer_skip", {"exit_after": 4}),
}


def measure(
    names: list[str], temperature: float, *, rounds: int, prompts: int, new_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, Callable[[], None]]]:
    """One row per drafter, and what was run. One thread, float32, batch 1."""
    torch.set_num_threads(1)
    outputs: dict[str, list[Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in ["plain", *names]:
        drafter, options = DRAFTERS.get(name, (None, {}))
        engine = load("demo-target", drafter=drafter, drafter_options=options, max_length=1024, max_rows=1)
        texts = workload(engine.tokenizer, prompts)

        def run(name: str = name, engine: Any = engine, texts: Any = texts) -> None:
            params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=new_tokens, ignore_eos=True)
            outputs[name] = [engine.generate([text], params)[0] for text in texts]

        runs[name] = run
    timing = interleave(runs, rounds)
    rows = []
    for name in names:
        own, plain = outputs[name], outputs["plain"]
        low, high = timing.spread("plain", name)
        rows.append(
            {
                "drafter": name,
                "temperature": temperature,
                "tau": mean(handle.stats.tau for handle in own),
                "speed_vs_plain": timing.ratio("plain", name),
                "speed_vs_plain_range": [low, high],
                "distinct_4": mean(distinct_4(handle.tokens) for handle in own),
                "identical": [handle.tokens for handle in own] == [handle.tokens for handle in plain],
                "rounds": rounds,
                "prompts": prompts,
                "new_tokens": new_tokens,
            }
        )
    return rows, runs


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["| drafter | T | tau | speed / plain | distinct-4 | identical |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['drafter']} | {row['temperature']:g} | {row['tau']:.2f} | {row['speed_vs_plain']:.2f} | "
            f"{row['distinct_4']:.2f} | {row['identical']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "parallel_cpu.json")
    options = parser.parse_args()
    facts, rows = environment(), []
    for temperature in (0.0, 1.0):
        found, _ = measure(
            list(DRAFTERS), temperature, rounds=options.rounds, prompts=options.prompts, new_tokens=options.new_tokens
        )
        rows += found
        options.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(rows) + "\n")
    print(as_markdown(rows))


if __name__ == "__main__":
    main()

"""The bundled hybrid target with and without its draft, and in transformers: `python -m benchmarks.hybrid_models`.

In each round all sides continue the same prompts of the bundled workload, one after the other, at batch 1. Speed is
the median over rounds of the ratio to plain decoding in the same round. transformers decodes with its own cache. The
rows go to benchmarks/results, and replace those of the same machine. OMP_WAIT_POLICY=passive is recorded: on a machine
with other work, threads that wait for each other otherwise burn the time of the one that works.
Tests: tests/benchmarks/test_hybrid_models.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.end_to_end import distinct_4, workload
from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import read_rows, write_whole
from benchmarks.harness.select_rows import RESULTS
from specdec_fast import SamplingParams, load
from specdec_fast.loading import ASSETS, load_tokenizer

TABLE = "hybrid_models_cpu.json"
TARGET, DRAFT = "demo-hybrid", "demo-draft"
PLAIN, SPECULATIVE, TRANSFORMERS = "plain", "speculative", "transformers"


def measure(
    temperature: float, threads: int, prompts: int, new_tokens: int, draft_tokens: int, rounds: int
) -> dict[str, Any]:
    """Returns the row of a temperature."""
    torch.set_num_threads(threads)
    texts = workload(load_tokenizer(TARGET), prompts)
    options: dict[str, Any] = {"max_rows": 1, "max_length": 1024, "prefix_sharing": False}
    engines: dict[str, Any] = {
        PLAIN: load(TARGET, drafter="none", **options),
        SPECULATIVE: load(TARGET, DRAFT, rule="replay", num_draft_tokens=draft_tokens, **options),
    }
    handles: dict[str, dict[int, Any]] = {name: {} for name in engines}

    def side(name: str) -> Callable[[], None]:
        turns = cycle(range(len(texts)))

        def run() -> None:
            at = next(turns)
            params = SamplingParams(temperature=temperature, seed=at, max_new_tokens=new_tokens, ignore_eos=True)
            handles[name][at] = engines[name].generate([texts[at]], params)[0]

        return run

    sides = {name: side(name) for name in engines}
    sides[TRANSFORMERS] = transformers_side(texts, temperature, new_tokens)
    timing = interleave(sides, rounds, turns=len(texts))
    written = {name: [each.tokens for _, each in sorted(found.items())] for name, found in handles.items()}
    drafted = [handle.stats for handle in handles[SPECULATIVE].values()]
    for engine in engines.values():
        engine.close()
    return {
        "temperature": temperature,
        "threads": threads,
        "prompts": len(texts),
        "new_tokens": new_tokens,
        "draft_tokens": draft_tokens,
        "rounds": rounds,
        "tokens_per_second": {name: len(texts) * new_tokens / timing.median(name) for name in sides},
        "speedup": timing.ratio(PLAIN, SPECULATIVE),
        "speedup_range": timing.spread(PLAIN, SPECULATIVE),
        "speedup_over_transformers": timing.ratio(TRANSFORMERS, SPECULATIVE),
        "tau": mean(stats.tau for stats in drafted),
        "alpha": mean(stats.alpha for stats in drafted),
        "distinct_4": mean(map(distinct_4, written[SPECULATIVE])),
        "same_texts": written[PLAIN] == written[SPECULATIVE],
    }


def transformers_side(texts: list[list[int]], temperature: float, new_tokens: int) -> Callable[[], None]:
    """Returns a side that continues the texts in turn with transformers' `generate`."""
    from transformers import AutoModelForCausalLM

    model, turns = AutoModelForCausalLM.from_pretrained(ASSETS / TARGET, dtype=torch.float32).eval(), cycle(texts)
    options: dict[str, Any] = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options.update(temperature=temperature, top_k=0, top_p=1.0)

    def run() -> None:
        tokens = torch.tensor([next(turns)])
        with torch.inference_mode():
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)

    return run


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the table of docs/guides/hybrid-models.md."""
    lines = [
        "| temperature | transformers | plain | with drafts | drafts / plain | range over rounds "
        "| drafts / transformers | tokens per pass |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        speeds, (low, high) = row["tokens_per_second"], row["speedup_range"]
        lines.append(
            f"| `{row['temperature']:g}` | {speeds[TRANSFORMERS]:.1f} | {speeds[PLAIN]:.1f} "
            f"| {speeds[SPECULATIVE]:.1f} | {row['speedup']:.2f} | {low:.2f} to {high:.2f} "
            f"| {row['speedup_over_transformers']:.2f} | {row['tau']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / TABLE)
    asked = parser.parse_args()
    facts = {**environment(), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default")}
    for temperature in asked.temperatures:
        row = measure(temperature, asked.threads, asked.prompts, asked.new_tokens, asked.draft_tokens, asked.rounds)
        row["environment"] = facts
        others = [each for each in read_rows(asked.out) if _key(each) != _key(row)]
        write_whole(asked.out, {"rows": sorted([*others, row], key=_key)})
        print(as_markdown([row]).splitlines()[-1], flush=True)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The machine and the setting of a row."""
    facts = row["environment"]
    return facts["cpu"], facts["isa"], row["threads"], row["temperature"]


if __name__ == "__main__":
    main()

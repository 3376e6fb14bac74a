"""Int8 weights beside float32 and bfloat16: perplexity on a text, and plain decoding in interleaved rounds.

    python -m benchmarks.int8_weights --model SmolLM2-135M-Instruct=FOLDER --model gemma-3-270m=FOLDER

Perplexity is over windows of 512 tokens, each scored by itself. The default text is README.md and ARCHITECTURE.md.
In each round all variants write the same greedy continuation, one after the other, and who goes first rotates. Speed
is the median over rounds of the ratio to float32 in the same round. Every model is written to benchmarks/results at
once, and replaces its rows of the same number of threads. Tests: tests/benchmarks/test_int8_weights.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.arguments import CLOCKS, add_clock, add_models, clock_name
from benchmarks.harness.interleave import environment
from benchmarks.harness.result_files import read_rows, write_whole
from benchmarks.harness.select_rows import RESULTS
from specdec_fast import SamplingParams, load

ROOT = Path(__file__).resolve().parents[1]
TABLE = "int8_weights_cpu.json"
WINDOW = 512
PROMPT = 64
FLOAT32 = "float32"
VARIANTS: dict[str, dict[str, str]] = {
    FLOAT32: {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8"},
    "int8, bfloat16": {"weights": "int8", "dtype": "bfloat16"},
}


def perplexity(model: Any, tokens: torch.Tensor) -> float:
    """Returns exp of the mean negative log-likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        for window in tokens.split(WINDOW):
            if len(window) > 1:
                logits = model(window[None], use_cache=False).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum"))
                count += len(window) - 1
    model.set_attn_implementation(used)
    return math.exp(total / count)


def measure(
    place: str, text: str, scored: int, new_tokens: int, threads: list[int], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Returns a row for every variant of a model and number of threads."""
    engines: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    tokens = torch.empty(0, dtype=torch.int64)
    for name, options in VARIANTS.items():
        shape = {"max_rows": 1, "max_length": PROMPT + new_tokens, "prefix_sharing": False}
        engine: Any = load(place, drafter="none", **shape, **options)
        tokens = torch.tensor(engine.tokenizer(text)["input_ids"][:scored])
        found[name] = {
            "variant": name,
            "scored_tokens": len(tokens),
            "perplexity": perplexity(engine.target.model, tokens),
        }
        engines[name] = engine
    base = found[FLOAT32]["perplexity"]
    for row in found.values():
        row["perplexity_change_percent"] = 100 * (row["perplexity"] / base - 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for at in range(rounds + 1):
            names = list(engines)
            for name in names[at % len(names) :] + names[: at % len(names)]:
                began = clock()
                engines[name].generate([tokens[:PROMPT].tolist()], params)
                if at:  # the first round warms up
                    times[name].append(clock() - began)
        for name, own in times.items():
            ratios = [other / one for other, one in zip(times[FLOAT32], own, strict=True)]
            speed = {"tokens_per_second": new_tokens / median(own), "speed_vs_float32": median(ratios)}
            rows.append(
                {**found[name], "threads": count, **speed, "speed_vs_float32_range": [min(ratios), max(ratios)]}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--text", type=Path, help="text that is scored and continued")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text that are scored")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    add_clock(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / TABLE)
    asked = parser.parse_args()
    clock = clock_name(parser, asked, asked.threads)
    files = [asked.text] if asked.text else [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    facts = {**environment(), "clock": clock}
    rows = read_rows(asked.out)
    for model, place in asked.model:
        new = measure(place, text, asked.tokens, asked.new_tokens, asked.threads, asked.rounds, CLOCKS[clock])
        rows = [row for row in rows if row["model"] != model or row["threads"] not in asked.threads]
        more = {"rounds": asked.rounds, "new_tokens": asked.new_tokens, "environment": facts}
        rows += [{"model": model, **row, **more} for row in new]
        write_whole(asked.out, {"rows": rows})
        for row in new:
            print(
                f"{model}, {row['threads']} threads, {row['variant']}: perplexity {row['perplexity']:.2f} "
                f"({row['perplexity_change_percent']:+.2f} %), {row['tokens_per_second']:.1f} tokens/s, "
                f"{row['speed_vs_float32']:.2f} of float32",
                flush=True,
            )


if __name__ == "__main__":
    main()

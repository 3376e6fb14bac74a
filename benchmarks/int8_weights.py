"""Int8 weights beside float32: perplexity on a text, and plain decoding in interleaved rounds.

    python benchmarks/int8_weights.py --model NAME [--text FILE] [--tokens 4096] [--threads 1] [--rounds 5]

Perplexity is over windows of 512 tokens, each scored by itself. The default text is README.md and ARCHITECTURE.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specdec_fast import SamplingParams, load

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 512


def perplexity(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Returns exp of the mean negative log-likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in tokens.split(WINDOW):
            if len(window) > 1:
                logits = model(window[None], use_cache=False).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum"))
                count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    files = [asked.text] if asked.text else [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    engines: dict[str, Any] = {}
    found: dict[str, dict[str, float]] = {}
    tokens = torch.empty(0, dtype=torch.int64)
    for name, options in {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"weights": "int8"},
        "int8, bfloat16": {"weights": "int8", "dtype": "bfloat16"},
    }.items():
        engine: Any = load(asked.model, max_rows=1, max_length=1024, **options)
        tokens = torch.tensor(engine.tokenizer(text)["input_ids"][: asked.tokens])
        model = engine.target.model
        used = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        found[name] = {"perplexity": perplexity(model, tokens)}
        model.set_attn_implementation(used)
        engines[name] = engine
    params = SamplingParams(temperature=0.0, max_new_tokens=asked.new_tokens, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for at in range(asked.rounds + 1):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.generate([tokens[:64].tolist()], params)
            if at:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    plain = found["float32"]["perplexity"]
    for name, own in times.items():
        found[name]["perplexity_change_percent"] = 100 * (found[name]["perplexity"] / plain - 1)
        found[name]["tokens_per_second"] = asked.new_tokens / statistics.median(own)
        ratios = [one / other for one, other in zip(times["float32"], own, strict=True)]
        found[name]["times_float32"] = statistics.median(ratios)
    print(json.dumps({"scored_tokens": len(tokens), "threads": asked.threads, "variants": found}, indent=1))


if __name__ == "__main__":
    main()

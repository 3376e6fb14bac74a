"""Cost of a drafter that does not pay under budget `goodput`, with steps that alternate with plain decoding.

`python -m benchmarks.goodput_controller` writes the same texts by plain decoding and by each drafter with
`budget="goodput"`, one step of each in turn. Both run within the same milliseconds, so other load on the machine
affects both alike. It moves the ratios of `benchmarks.drafters` by several percent. The time of a text includes prefill
and learning. A second plain engine runs in the same way: the distance of its ratio from 1 is the error. Every row is
written to benchmarks/results at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

from benchmarks.drafters import METHODS, engine_of
from benchmarks.end_to_end import distinct_4, workload
from benchmarks.harness.interleave import alternate, environment
from benchmarks.harness.select_rows import named, where
from specdec_fast import SamplingParams
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.rules import DEFAULT

AGAIN = "plain"  # the second engine without drafts


def measure(
    name: str, temperature: float, *, rounds: int, prompts: int, new_tokens: int, heads: Path | None = None
) -> dict[str, Any]:
    """Returns the row of one method, with one thread, in float32, at batch 1.

    One text runs before the measurement. Each round has its own seed, and begins with a drafter that has learnt nothing
    from other requests, since texts repeat at T = 0.
    """
    torch.set_num_threads(1)
    tokenizer, target = load_tokenizer("demo-target"), load_model("demo-target")
    params = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
    texts = workload(tokenizer, prompts)
    ratios, taus, spreads, identical = [], [], [], True
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sides = [engine_of(who, target, tokenizer, temperature, "goodput", place, heads) for who in (AGAIN, name)]
        alternate(sides, texts[0], replace(params, seed=0))
        forget = getattr(sides[1].drafter, "forget", None)
        for seed in range(1, rounds + 1):
            if forget is not None:
                forget()
            for text in texts:
                (plain, own), handles = alternate(sides, text, replace(params, seed=seed))
                ratios.append(plain / own)
                taus.append(handles[1].stats.tau)
                spreads.append(distinct_4(handles[1].tokens))
                identical &= handles[0].tokens == handles[1].tokens
    interval = bootstrap((ratios,), np.median, rng=0).confidence_interval  # 95%
    return {
        "drafter": name,
        "temperature": temperature,
        "tau": mean(taus),
        "speed_vs_plain": float(np.median(ratios)),
        "speed_vs_plain_95": [float(interval.low), float(interval.high)],
        "distinct_4": mean(spreads),
        "identical": identical,
        "texts": len(ratios),
        "new_tokens": new_tokens,
    }


def methods(only: str = "", heads: Path | None = None) -> list[str]:
    """Returns methods under the default rule that are not warm and have their heads; `only` selects by title."""
    found = [name for name, method in METHODS.items() if method.memory != "warm" and method.rule == DEFAULT]
    return [name for name in named(only, found) if not METHODS[name].own_head or METHODS[name].head(heads)]


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    titles = "| drafter | T | tau | speed / plain | 95% of the median | distinct-4 | texts | identical |"
    lines = [titles, "|" + "---|" * 8]
    for row in rows:
        low, high = row["speed_vs_plain_95"]
        lines.append(
            f"| {row['drafter']} | {row['temperature']:g} | {row['tau']:.2f} | {row['speed_vs_plain']:.3f} | "
            f"{low:.3f} to {high:.3f} | {row['distinct_4']:.2f} | {row['texts']} | {row['identical']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--only", default="", help="titles of methods, or parts of titles, separated by |")
    parser.add_argument("--heads", type=Path, help="folder of trained heads, by drafter, beside the bundled ones")
    parser.add_argument(
        "--out", type=Path, help="result file (default: the table of all methods; with --only nothing is written)"
    )
    options = parser.parse_args()
    out = where(options.out, options.only, "goodput_cpu.json")
    facts = {**environment(), "threads": 1, "dtype": "float32"}
    names = [AGAIN, *methods(options.only, options.heads)]
    rows: list[dict[str, Any]] = []
    for name in names:
        for temperature in (0.0, 1.0):
            row = measure(
                name,
                temperature,
                rounds=options.rounds,
                prompts=options.prompts,
                new_tokens=options.new_tokens,
                heads=options.heads,
            )
            rows.append(row)
            print(as_markdown(rows[-1:]).splitlines()[-1], flush=True)
            if out is not None:
                out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    if out is not None:
        out.with_suffix(".md").write_text(as_markdown(rows) + "\n")


if __name__ == "__main__":
    main()

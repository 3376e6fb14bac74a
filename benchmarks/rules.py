"""Tokens per target pass of every rule on the bundled pair: the same prompts, seeds and number of draft tokens.

`python -m benchmarks.rules` prints a table and writes a result file (in benchmarks/results) after every row. The
numbers depend on models, seeds and rules only, so load on the machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.end_to_end import workload
from benchmarks.harness.interleave import environment
from specdec_fast import SamplingParams, load

RESULTS = Path(__file__).parent / "results"
CHAIN: dict[str, Any] = {"drafter": "draft_model", "num_draft_tokens": 6}
SIX_NODES = [2, 2]  # widths: two children of the root, two of each of them


def _tree(how: str) -> dict[str, Any]:
    return {"drafter": "draft_tree", "drafter_options": {"widths": SIX_NODES, "how": how}}


# rule, proposals in words, arguments of `load`
CONTENDERS: list[tuple[str, str, dict[str, Any]]] = [
    ("rejection", "chain of 6", CHAIN),
    ("block", "chain of 6", CHAIN),
    ("replay", "chain of 6", CHAIN),
    ("recursive_rejection", "tree of 6, independent siblings", _tree("iid")),
    ("recursive_rejection", "tree of 6, without replacement", _tree("without_replacement")),
    ("recursive_rejection", "tree of 6, hybrid", _tree("hybrid")),
    ("traversal", "tree of 6, independent siblings", _tree("iid")),
    ("traversal", "tree of 6, without replacement", _tree("without_replacement")),
    ("traversal", "tree of 6, hybrid", _tree("hybrid")),
    ("replay", "tree of 6, coupled", _tree("coupled")),
]


def measure(rule: str, proposals: str, how: dict[str, Any], seeds: int, new_tokens: int) -> dict[str, Any]:
    """Measures tau at T = 1 over the whole workload and `seeds` seeds."""
    engine = load("demo-target", "demo-draft", rule=rule, max_length=1024, **how)
    texts = workload(engine.tokenizer, 16)
    taus = []
    for seed in range(seeds):
        params = [
            SamplingParams(temperature=1.0, seed=1000 * seed + at, max_new_tokens=new_tokens, ignore_eos=True)
            for at in range(len(texts))
        ]
        taus += [handle.stats.tau for handle in engine.generate(texts, params)]
    half = 1.96 * stdev(taus) / math.sqrt(len(taus))
    return {"rule": rule, "proposals": proposals, "tau": mean(taus), "half_width_95": half, "texts": len(taus)}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as two tables, of chains and of trees of depth 2."""
    parts = []
    for what, most in (
        ("chain", 7),
        ("tree", 3),
    ):  # a deeper draft may yield more, so chains and trees are not compared
        parts += [f"| rule | {what}s | tau, at most {most} | 95% interval |", "|---|---|---|---|"]
        parts += [
            f"| {row['rule']} | {row['proposals']} | {row['tau']:.3f} | +- {row['half_width_95']:.3f} |"
            for row in rows
            if row["proposals"].startswith(what)
        ]
        parts.append("")
    return "\n".join(parts).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "rules_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for contender in CONTENDERS:
        rows.append(measure(*contender, arguments.seeds, arguments.new_tokens))
        print(f"{rows[-1]['rule']}, {rows[-1]['proposals']}: tau {rows[-1]['tau']:.3f}", flush=True)
        result = {"environment": environment(), "temperature": 1.0, "new_tokens": arguments.new_tokens, "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(as_markdown(rows) + "\n")
    print(as_markdown(rows))


if __name__ == "__main__":
    main()

"""Time of the lab's draws at one place of random distributions, for every lossless rule that samples.

`python -m benchmarks.lab.draws_time` prints a row per rule. It writes a result file (in benchmarks/results) after
every row. A time is valid only if the draws have the target's distribution: `lowest_p` is the smallest p-value of their
tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.harness.interleave import environment
from specdec_fast.lab.backend_agreement import random_pair
from specdec_fast.lab.draw_counts import Drawing
from specdec_fast.lab.exact_distributions import has_a_dist, own_rules
from specdec_fast.lab.text_positions import Place
from specdec_fast.rules import get_rule

RESULTS = Path(__file__).parents[1] / "results"
RULES = [name for name in own_rules() if has_a_dist(get_rule(name))]


def place(vocab: int) -> Place:
    """Returns a place with random distributions."""
    p, q = random_pair(vocab, seed=1)
    base, draft = (dists.logits[0].double().softmax(0).numpy() for dists in (p, q))
    return Place("random distributions", "first speculated", (1, 2, 3), p, q, base, draft, 0.0)


def measure(rule: str, here: Place, draws: int, threads: int, device: str) -> dict[str, Any]:
    """Times `draws` texts, after a warm-up of at most 4,000."""
    torch.set_num_threads(threads)
    Drawing(here, get_rule(rule), seed=1, device=device).run(min(4000, draws))
    drawing = Drawing(here, get_rule(rule), seed=2, device=device)
    start = perf_counter()
    drawing.run(draws)
    seconds = perf_counter() - start
    layout = drawing.simulator.layout
    return {
        "rule": rule,
        "drafts": f"{len(layout.parents) - 1} nodes, {layout.pick}",
        "threads": threads,
        "seconds": round(seconds, 1),
        "lowest_p": min(test.p_value for test in drawing.tests()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "lab_draws_cpu.json")
    parser.add_argument("--json", action="store_true", help="print the result file in place of a row per rule")
    asked = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "environment": environment(),
        "what": "specdec_fast.lab.draw_counts.Drawing at one place of random distributions",
        "device": "cpu" if asked.device == "cpu" else torch.cuda.get_device_name(asked.device),
        "draws": asked.draws,
        "vocab": asked.vocab,
        "rows": [],
    }
    here = place(asked.vocab)
    for threads in asked.threads:
        for rule in asked.rules:
            row = measure(rule, here, asked.draws, threads, asked.device)
            result["rows"].append(row)
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
            if not asked.json:
                print(f"{rule}, {row['drafts']}, {threads} threads: {row['seconds']} s", flush=True)
    if asked.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

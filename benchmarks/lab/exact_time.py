"""Time of the lab's exact part: all rules and distributions, vocabularies of 3 and 4, trees of up to four nodes.

`python -m benchmarks.lab.exact_time` prints a row per rule and part and writes a result file (in benchmarks/results).
It enumerates the same cases as `specdec lab`, and records whether they hold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.harness.interleave import environment
from specdec_fast.lab.backend_agreement import run_agreement
from specdec_fast.lab.exact_distributions import own_rules, run_exact
from specdec_fast.lab.expected_acceptance import run_expected

RESULTS = Path(__file__).parents[1] / "results"


PARTS: dict[str, Callable[[Sequence[str]], Sequence[Any]]] = {
    "dists": run_exact,
    "closed forms": run_expected,
    "same keys": run_agreement,
}


def measure(rule: str) -> list[dict[str, Any]]:
    """Returns a row per part of one rule: cases, wall-clock and CPU seconds, and whether all cases hold."""
    rows = []
    for part, run in PARTS.items():
        clock, work = perf_counter(), process_time()
        found = run([rule])
        clock, work = perf_counter() - clock, process_time() - work
        if found:
            row = {"rule": rule, "part": part, "cases": len(found), "holds": all(each.holds for each in found)}
            rows.append(row | {"seconds": round(clock, 4), "cpu_seconds": round(work, 4)})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=own_rules(), default=own_rules())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "exact_cpu.json")
    parser.add_argument("--json", action="store_true", help="print the result file in place of the rows")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": environment(), "threads": asked.threads, "rows": rows}
    for rule in asked.rules:
        for row in measure(rule):
            rows.append(row)
            if not asked.json:
                print(f"{rule}, {row['part']}: {row['cases']} cases, {row['cpu_seconds']} s of work", flush=True)
    for kind in ("seconds", "cpu_seconds"):
        result[kind] = {
            part: round(sum(row[kind] for row in rows if row["part"] == part), 4)
            for part in dict.fromkeys(row["part"] for row in rows)
        }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(result, indent=1)
        if asked.json
        else f"all rules: {result['seconds']} s, of work {result['cpu_seconds']} s"
    )


if __name__ == "__main__":
    main()

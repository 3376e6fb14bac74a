"""How long the lab's exact part takes: all rules, all laws, vocabularies of 3 and 4, trees of up to four nodes.

`python -m benchmarks.lab_exact` prints a row per rule and part and writes a result file (in benchmarks/results).
What is enumerated is what `specdec lab` enumerates; whether it holds stands beside every time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.interleave import environment
from specdec_fast.lab.agreement import run_agreement
from specdec_fast.lab.exact import own_rules, run_exact
from specdec_fast.lab.expected import run_expected

RESULTS = Path(__file__).parent / "results"


def measure(rule: str) -> list[dict[str, Any]]:
    """Seconds of the three parts for one rule."""
    rows: list[dict[str, Any]] = []

    def add(part: str, start: float, found: list[Any], error: float | None) -> None:
        holds = all(each.holds for each in found)
        seconds = round(perf_counter() - start, 2)
        rows.append({"rule": rule, "part": part, "cases": len(found), "seconds": seconds, "holds": holds})
        if error is not None:
            rows[-1]["largest_error"] = error

    start = perf_counter()
    laws = run_exact([rule])
    add("laws", start, laws, max((each.error for each in laws), default=None))
    start = perf_counter()
    add("closed forms", start, run_expected([rule]), None)
    start = perf_counter()
    add("same keys", start, run_agreement([rule]), None)
    return [row for row in rows if row["cases"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=own_rules(), default=own_rules())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "exact_cpu.json")
    parser.add_argument("--json", action="store_true", help="print the result file in place of the rows")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": environment(), "threads": asked.threads, "seconds": {}, "rows": rows}
    for rule in asked.rules:
        for row in measure(rule):
            rows.append(row)
            if not asked.json:
                print(f"{rule}, {row['part']}: {row['cases']} cases, {row['seconds']} s", flush=True)
    for part in dict.fromkeys(row["part"] for row in rows):
        result["seconds"][part] = round(sum(row["seconds"] for row in rows if row["part"] == part), 2)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if asked.json else f"all rules: {result['seconds']}")


if __name__ == "__main__":
    main()

"""Two experiments with the bundled trained heads: greedy texts against plain decoding, and a million draws.

`python -m benchmarks.lab.heads` is `specdec lab --no-exact --drafter NAME` for every case, prints a row for each and
writes a result file (in benchmarks/results) after every case. The results are `identical` for greedy texts and
`rejected` for the tests of draws. Every place has its draws, the smallest p-value of its tests, and a bound on the
distance of its distribution from the target's (99.9%).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import typer

from benchmarks.harness.interleave import environment
from specdec_fast.commands.lab import lab

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter with the other options of the command. Temperature 0 compares greedy texts only."""

    drafter: str
    options: tuple[str, ...] = ()
    rule: str | None = None
    temperature: float = 1.0
    prompts: int = 1


CASES = {
    "medusa, greedy": Case("medusa", temperature=0.0, prompts=16),
    "eagle3, greedy": Case("eagle3", temperature=0.0, prompts=16),
    "eagle3, dynamic": Case("eagle3"),
    "eagle3, sampled": Case("eagle3", ("depth=0",), "traversal"),
}


def measure(case: Case, draws: int, threads: int) -> dict[str, Any]:
    """Runs the lab on a case, with `draws` per place."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        clock, work = perf_counter(), process_time()
        with suppress(typer.Exit):  # failures are in the report
            lab(
                Path(folder),
                drafter=case.drafter,
                drafter_option=list(case.options),
                rule=case.rule,
                temperature=case.temperature,
                prompts=case.prompts,
                draws=draws,
                exact=False,
                threads=threads,
            )
        seconds = {"seconds": round(perf_counter() - clock, 1), "cpu_seconds": round(process_time() - work, 1)}
        report = json.loads((Path(folder) / "report.json").read_text())
    texts, tests = report["greedy"], report["tests"]
    lowest = {test["place"]: min(t["p_value"] for t in tests if t["place"] == test["place"]) for test in tests}
    return {
        **{
            name: report[name]
            for name in ("model", "drafter", "drafter_options", "rule", "temperature", "seed", "holds")
        },
        "greedy": {
            "texts": len(texts),
            "identical": sum(text["identical"] for text in texts),
            "tokens": sum(text["tokens"] for text in texts),
        },
        "tests": len(tests),
        "rejected": sum(test["rejected"] for test in tests),
        "places": [
            {"lowest_p": lowest[row["place"]]}
            | {name: row[name] for name in ("place", "draws", "acceptance_rate", "certified_distance", "row_error")}
            for row in report["summaries"]
        ],
        "draws": sum(row["draws"] for row in report["summaries"]),
        **seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draws", type=int, default=1_000_000, help="at each place")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "lab_heads_cpu.json")
    asked = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    result = {"environment": environment(), "threads": asked.threads, "rows": rows}
    for name in asked.cases:
        row = {"case": name, **measure(CASES[name], asked.draws, asked.threads)}
        rows.append(row)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        same, tests = row["greedy"], f"{row['tests']} tests, {row['rejected']} rejected"
        print(
            f"{name}: {same['identical']} of {same['texts']} greedy texts identical; {row['draws']:,} draws, {tests}; "
            f"{row['cpu_seconds']} s of work",
            flush=True,
        )


if __name__ == "__main__":
    main()

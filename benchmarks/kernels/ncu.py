"""Runs five operators under NVIDIA's ncu and keeps its numbers: python -m benchmarks.kernels.ncu --out results/

Clocks are left as they are (--clock-control none). Where the tool is missing, or may not read the device's counters,
one line says so and nothing fails.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import write_whole
from benchmarks.kernels.nvidia_tools import missing

OPERATORS = ("tree_attention", "distribution_stats", "rejection_verify_logits", "replay_verify", "kv_commit")
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__waves_per_multiprocessor",
)
SECONDS = 40
"""Most time of an operator."""


def kernels(text: str) -> list[dict[str, Any]]:
    """Reads ncu's CSV.

    Args:
        text: What it printed: lines of its own, then one row for each kernel and metric.

    Returns:
        Each kernel in order, with its name, grid, block and the value of every metric.
    """
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[first:]):
        own = found.setdefault(
            row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
        )
        value = row["Metric Value"].replace(",", "")
        own[row["Metric Name"]] = float(value) if value.replace(".", "", 1).isdigit() else value
    return list(found.values())


def profile(op: str, size: str) -> dict[str, Any]:
    """One operator under ncu: its kernels, or why there are none."""
    tool = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    numbers = ["--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    command = [*tool, *numbers, sys.executable, "-m", "benchmarks.kernels.once", "--size", size, op]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"op": op, "kernels": [], "reason": f"it took more than {SECONDS} s"}
    found = kernels(done.stdout)
    if found:
        return {"op": op, "kernels": found}
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line or "Error" in line]
    return {"op": op, "kernels": [], "reason": next(iter(said), f"no kernel was seen (status {done.returncode})")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=("large", "tiny"), default="large")
    parser.add_argument("ops", nargs="*", default=OPERATORS)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"metrics": METRICS, "operators": []}
    if reason := missing("ncu"):
        print(f"ncu: {reason}; no counters are read")
        write_whole(options.out / "ncu.json", found | {"missing": reason})
        return 0
    for op in options.ops:
        found["operators"].append(profile(op, options.size))
        write_whole(options.out / "ncu.json", found)
        last = found["operators"][-1]
        print(f"{op}: {len(last['kernels'])} kernels{', ' + last['reason'] if 'reason' in last else ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

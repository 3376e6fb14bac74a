"""Runs the operators on small sizes under NVIDIA's compute-sanitizer, in several processes, and keeps its findings.

    python -m benchmarks.kernels.sanitize memcheck --out results/     # or racecheck; sanitize-memcheck.json

Exit status 1 if it finds an error or a call fails. Where the tool is missing, one line says so and nothing fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import write_whole
from benchmarks.kernels.nvidia_tools import missing
from specdec_kernels import OPS
from specdec_kernels.testing.agreement import SAMPLES

TOOL = "compute-sanitizer"
OPTIONS = ("--print-limit", "20", "--report-api-errors", "no", "--target-processes", "all")
NO_FINDINGS = ("COMPUTE-SANITIZER", "Target application", "Saved host", "Host Frame", "Program hit", "This tool")
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+)")


def findings(text: str) -> tuple[list[dict[str, Any]], int | None]:
    """Reads the output of compute-sanitizer.

    Args:
        text: What it printed; its own lines begin with "=========".

    Returns:
        What was found: in words, with the first lines that say where; and the number in its summary, None if the
        program ended before there was one.
    """
    found: list[dict[str, Any]] = []
    counts = [int(match[2]) for match in SUMMARY.finditer(text)]
    for line in text.splitlines():
        if not line.startswith("========= "):
            continue
        words = line.removeprefix("========= ")
        if words.startswith("    "):
            if found and len(found[-1]["where"]) < 4:
                found[-1]["where"].append(words.strip())
        elif words.strip() and not words.startswith(NO_FINDINGS) and "SUMMARY" not in words:
            found.append({"what": words.strip(), "where": []})
    return found, sum(counts) if counts else None


def groups(processes: int) -> list[list[str]]:
    """Operators with a kernel for GPUs, shared out among so many processes."""
    names = [op for op in SAMPLES if {"triton", "cuda"} & {backend.name for backend in OPS[op].backends}]
    return [names[first::processes] for first in range(min(processes, len(names)))]


def check(tool: str, ops: list[str]) -> dict[str, Any]:
    """One process under the tool."""
    command = [TOOL, "--tool", tool, *OPTIONS, sys.executable, "-m", "benchmarks.kernels.once", "--size", "small", *ops]
    own = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }  # the caching allocator would hide accesses out of bounds
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    found, count = findings(done.stdout + done.stderr)
    ran = done.stdout.count(": ran\n")
    row = {"ops": ops, "calls": ran, "errors": count, "status": done.returncode, "findings": found}
    return row if done.returncode == 0 else row | {"printed": (done.stdout + done.stderr)[-4000:]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    file = options.out / f"sanitize-{options.tool}.json"
    if reason := missing(TOOL):
        print(f"{options.tool}: {reason}; no kernel is checked by it")
        write_whole(file, {"tool": options.tool, "missing": reason, "runs": []})
        return 0
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.processes) as pool:
        for each in as_completed([pool.submit(check, options.tool, ops) for ops in groups(options.processes)]):
            runs.append(each.result())
            write_whole(file, {"tool": options.tool, "runs": runs})
            last = runs[-1]
            print(f"{' '.join(last['ops'])}: {last['calls']} calls, {last['errors']} errors", flush=True)
    return any(run["status"] or run["errors"] != 0 for run in runs)


if __name__ == "__main__":
    sys.exit(main())

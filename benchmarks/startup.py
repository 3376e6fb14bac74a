"""Start-up time: `import specdec_fast`, and `make demo` twice on a fresh clone.

    python -m benchmarks.startup                # imports alone
    python -m benchmarks.startup --clone        # also clones the repository and runs `make demo` there, twice

The first `make demo` of a clone creates an environment, installs packages and builds. This takes minutes, mostly for
downloads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.interleave import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "startup_cpu.json"
IMPORTS = {
    "import specdec_fast": "import specdec_fast",
    "its names, torch being there": "import torch; begun(); from specdec_fast import Engine, SamplingParams, load",
}
PROGRAM = """
import time
start = time.perf_counter()
def begun():
    global start
    start = time.perf_counter()
{work}
print(time.perf_counter() - start)
"""


def seconds_of(work: str, rounds: int) -> float:
    """Returns the median seconds of an import, each in a fresh process."""
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    found = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(rounds)]
    return median(found)


def demo_seconds() -> list[float]:
    """Returns the seconds of `make demo` on a fresh clone, and of a second run."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        found = []
        for _ in range(2):
            start = time.perf_counter()
            subprocess.run(["make", "--no-print-directory", "demo"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
            found.append(time.perf_counter() - start)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clone", action="store_true", help="also time make demo on a fresh clone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [
        {"what": name, "seconds": round(seconds_of(work, options.rounds), 4)} for name, work in IMPORTS.items()
    ]
    if options.clone:
        names = "make demo, fresh clone", "make demo, again"
        rows += [{"what": name, "seconds": round(each, 1)} for name, each in zip(names, demo_seconds())]
    for row in rows:
        print(f"{row['what']:<30} {row['seconds']} s")
    options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

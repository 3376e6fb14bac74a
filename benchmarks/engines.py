"""The sampling of other engines, tested by the lab, and the page that shows the findings.

    python -m benchmarks.engines transformers transformers=OTHER/bin/python vllm=THIRD/bin/python
    python -m benchmarks.engines --page

Each argument is an engine, with the interpreter in which it is installed if that is another one. Rows are kept in
build/engines, so an interrupted run loses the engine at work and no other. In the end, all rows go to
benchmarks/results/engines_cpu.json with the machine, and to the tables of docs/engines.md. Tests:
tests/benchmarks/test_engines.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.interleave import environment
from benchmarks.harness.result_files import write_whole
from benchmarks.harness.select_rows import RESULTS
from specdec_fast.lab.engines.settings import ENGINES
from specdec_fast.lab.engines.table import as_markdown, key_of, read_rows

ROOT = Path(__file__).resolve().parents[1]
TABLE = "engines_cpu.json"
PAGE = ROOT / "docs" / "engines.md"
FOLDER = ROOT / "build" / "engines"
_TABLES = re.compile(r"(<!-- tables: begin -->\n).*?(<!-- tables: end -->)", re.DOTALL)


def commands(engines: Sequence[str], out: Path, draws: int) -> list[list[str]]:
    """Returns the commands that test `engines`, each `NAME` or `NAME=INTERPRETER`."""
    found = []
    for each in engines:
        name, _, python = each.partition("=")
        command = [sys.executable, "-m", "specdec_fast", "lab", "--engine", name, "--out", str(out)]
        found.append([*command, "--draws", str(draws), *(["--python", python] if python else [])])
    return found


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by engine and version, in the order in which settings are tested."""
    places = {(name, each.name): at for name in ENGINES for at, each in enumerate(ENGINES[name])}
    return sorted(rows, key=lambda row: (*key_of(row)[:2], places[row["engine"], row["setting"]]))


def with_tables(page: str, rows: Sequence[dict[str, Any]], source: str) -> str:
    """Returns a page whose tables are those of `rows`."""
    if not _TABLES.search(page):
        raise ValueError("docs/engines.md: got no lines `<!-- tables: begin -->` and `<!-- tables: end -->`")
    tables = as_markdown(in_order(rows), above=f"<!-- results: {source} -->")
    return _TABLES.sub(lambda found: f"{found[1]}\n{tables}\n\n{found[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE[=INTERPRETER]", help="engines to test now")
    parser.add_argument("--draws", type=int, default=4000, help="drawn texts of each row (default: 4000)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the rows (default: build/engines)")
    parser.add_argument("--page", action="store_true", help="write the results and the page; alone: of earlier runs")
    asked = parser.parse_args()
    for command in commands(asked.engines, asked.out, asked.draws):
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status not in (0, 1):  # 1: an engine differs, which is a finding
            raise SystemExit(status)
    rows = in_order(read_rows(asked.out))
    if asked.page and rows:
        source = RESULTS / TABLE
        write_whole(source, {"environment": environment(), "rows": rows})
        PAGE.write_text(with_tables(PAGE.read_text(), rows, str(source.relative_to(ROOT))))
        print(f"{len(rows)} rows in {source.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

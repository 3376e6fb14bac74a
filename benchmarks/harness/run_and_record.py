"""Runs benchmarks of some files and records what they found: `python -m benchmarks.harness.run_and_record FILE --out
RESULTS.json`.

One row per benchmark: its parameters, what it says about itself (`extra_info`) and the median and least microseconds
of a call, the median per row of a batch too where there is a number of `rows`. A machine that is in the file already
has its rows replaced; other machines' stay.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.interleave import environment


def _plain(value: Any) -> Any:
    """A parameter as it was written: pytest-benchmark marks what JSON does not know."""
    return re.sub(r"^UNSERIALIZABLE\[(.*)\]$", r"\1", value) if isinstance(value, str) else value


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows from the JSON of pytest-benchmark."""
    rows = []
    for each in found["benchmarks"]:
        named = {of: _plain(value) for of, value in (each["params"] or {}).items()}
        name = each["name"].partition("[")[0].removeprefix("test_")
        timed = {f"{kind}_us": round(1e6 * each["stats"][kind], 2) for kind in ("median", "min")}
        row = {"benchmark": name, **named, **each["extra_info"], **timed}
        if "rows" in row:
            row["median_us_per_row"] = round(timed["median_us"] / row["rows"], 2)
        rows.append(row)
    return rows


def joined(before: dict[str, Any], facts: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of a results file with these rows for this machine."""
    machine = facts["cpu"], facts["isa"]
    others = [
        each
        for each in before.get("machines", [])
        if (each["environment"]["cpu"], each["environment"]["isa"]) != machine
    ]
    return {"machines": [*others, {"environment": facts, "rows": rows}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+", help="files of benchmarks")
    parser.add_argument("-k", dest="only", default="", help="as pytest's -k")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    facts = environment()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "benchmarks.json"
        command = [sys.executable, "-m", "pytest", "-q", *map(str, options.file), "-k", options.only]
        subprocess.run([*command, f"--benchmark-json={report}"], check=True)
        rows = rows_of(json.loads(report.read_text()))
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps(joined(before, facts, rows), indent=1, default=str) + "\n")
    print(f"{options.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()

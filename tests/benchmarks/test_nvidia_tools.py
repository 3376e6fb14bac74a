"""What compute-sanitizer and ncu print is read, and where they are missing one line says so."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import report  # noqa: E402
from benchmarks.kernels import ncu, nvidia_tools, sanitize  # noqa: E402
from specdec_kernels import OPS  # noqa: E402

MEMCHECK = """========= COMPUTE-SANITIZER
tree_plan plain torch.float32: ran
========= Invalid __global__ write of size 4 bytes
=========     at scan+0x1a0 in triton_kernel.py:45
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f0000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at walk+0x90 in triton_kernel.py:12
=========     and Read access at walk+0xb0 in triton_kernel.py:13 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
COUNTERS = """==PROF== Connected to process 12
==PROF== Profiling "scan": 0%....100% - 3 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","12","python","127.0.0.1","scan","1","7","(128, 1, 1)","(48, 126, 1)","0","9.0","Command line profiler metrics",\
"gpu__time_duration.sum","ns","12,345"
"0","12","python","127.0.0.1","scan","1","7","(128, 1, 1)","(48, 126, 1)","0","9.0","Command line profiler metrics",\
"launch__registers_per_thread","register/thread","123"
"1","12","python","127.0.0.1","join","1","7","(128, 1, 1)","(48, 1, 1)","0","9.0","Command line profiler metrics",\
"gpu__time_duration.sum","ns","678"
"""


def tool(folder: Path, name: str, printed: str, status: int = 0) -> None:
    """A program of that name that prints so much."""
    (folder / f"{name}.txt").write_text(printed)
    path = folder / name
    path.write_text(f'#!/bin/sh\ncat "{folder / name}.txt"\nexit {status}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_findings_of_the_sanitizer_are_read() -> None:
    (found,), count = sanitize.findings(MEMCHECK)
    assert count == 1 and found["what"] == "Invalid __global__ write of size 4 bytes"
    assert found["where"][0] == "at scan+0x1a0 in triton_kernel.py:45"
    (race,), hazards = sanitize.findings(RACECHECK)
    assert hazards == 1 and race["what"].startswith("Error: Race reported") and "4 hazards" in race["where"][0]
    assert sanitize.findings("========= COMPUTE-SANITIZER\nran\n========= ERROR SUMMARY: 0 errors\n") == ([], 0)
    assert sanitize.findings("========= COMPUTE-SANITIZER\nKilled\n") == ([], None), "it did not end"


def test_every_operator_with_a_kernel_is_checked_once() -> None:
    shared_out = sanitize.groups(5)
    ops = [op for group in shared_out for op in group]
    assert len(shared_out) == 5 and len(ops) == len(set(ops)) and set(ops) <= set(OPS) and "kv_commit" in ops


def test_the_sanitizer_s_errors_fail_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sanitize, "groups", lambda processes: [["tree_plan"]])
    asked = ["memcheck", "--out", str(tmp_path), "--processes", "1"]
    for printed, status, expected in ((MEMCHECK, 0, 1), (MEMCHECK.replace("1 error", "0 errors"), 0, 0), ("", 9, 1)):
        tool(tmp_path, "compute-sanitizer", printed, status)
        assert sanitize.main(asked) == expected
        (run,) = json.loads((tmp_path / "sanitize-memcheck.json").read_text())["runs"]
        assert run["calls"] == printed.count(": ran") and run["status"] == status
    assert "did not end" in report.page(tmp_path)


def test_counters_of_ncu_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scan, join = ncu.kernels(COUNTERS)
    assert scan["gpu__time_duration.sum"] == 12345 and scan["launch__registers_per_thread"] == 123
    assert (join["kernel"], join["grid"], join["gpu__time_duration.sum"]) == ("join", "(48, 1, 1)", 678)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool(tmp_path, "ncu", COUNTERS)
    assert ncu.main(["--out", str(tmp_path), "distribution_stats"]) == 0
    assert "scan" in report.page(tmp_path)
    tool(tmp_path, "ncu", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 1)
    assert ncu.main(["--out", str(tmp_path), "distribution_stats"]) == 0
    (row,) = json.loads((tmp_path / "ncu.json").read_text())["operators"]
    assert row["kernels"] == [] and "ERR_NVGPUCTRPERM" in row["reason"]


def test_a_tool_that_is_missing_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["racecheck", "--out", str(tmp_path)]) == 0 and ncu.main(["--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "racecheck: compute-sanitizer is not installed; no kernel is checked by it",
        "ncu: ncu is not installed; no counters are read",
    ]
    monkeypatch.setenv(nvidia_tools.REHEARSAL, "1")
    tool(tmp_path, "ncu", COUNTERS)
    assert nvidia_tools.missing("ncu") == "a simulated GPU runs no kernels"
    assert "not installed" in report.page(tmp_path)

"""The script of a GPU session: three commands that keep to their time, whose results are packed whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import machine  # noqa: E402

SCRIPT = ROOT / "benchmarks" / "gpu_session.sh"
COMMANDS = ("correctness", "kernels", "steps")
FAKE = """#!/bin/sh
case "$*" in
*benchmarks.gpu.report*) exec {python} "$@";;
*benchmarks.gpu.machine*) exit 0;;
{cases}
esac
"""
"""Python that runs the report only."""
STUBBORN = """exec {python} -c "import signal, sys, time
signal.signal(15, signal.SIG_IGN)
open(sys.argv[1], 'w')
time.sleep(60)" {started}"""
"""Takes long and does not end when it is asked to."""


def session(*words: str | Path, **own: str) -> subprocess.Popen[str]:
    """A session, with the variables of its environment."""
    command = ["bash", str(SCRIPT), *map(str, words)]
    environment = os.environ | {"PYTHON": sys.executable} | own
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def fake_python(folder: Path, cases: str) -> str:
    """A program in place of Python."""
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, cases=cases))
    path.chmod(0o755)
    return str(path)


def results(folder: Path) -> dict[str, bytes]:
    """What a session packed, which is the only file that it leaves."""
    assert [each.name for each in folder.iterdir()] == ["results.tar.gz"]
    with tarfile.open(folder / "results.tar.gz") as tar:
        files = {entry.name.removeprefix("./"): tar.extractfile(entry) for entry in tar if entry.isfile()}
        return {name: stream.read() for name, stream in files.items() if stream is not None}


def parts(packed: dict[str, bytes]) -> dict[str, str]:
    """How each part went."""
    return dict(line.split("\t")[:2] for line in packed["summary.tsv"].decode().splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "got command ''; expected correctness, kernels or steps"),
        (("everything",), "got command 'everything'; expected correctness, kernels or steps"),
        (("steps", "--fast"), "got option '--fast'; expected --rehearse or none"),
    ],
)
def test_unknown_arguments_are_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    asked = session(*words)
    printed, wrong = asked.communicate(timeout=30)
    assert (asked.returncode, printed, wrong) == (64, "", f"gpu_session: {said}\n")


def test_a_machine_without_a_driver_is_reported_in_one_line(tmp_path: Path) -> None:
    asked = session("kernels", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    printed, _ = asked.communicate(timeout=60)
    packed = results(tmp_path / "out")
    assert asked.returncode == 1 and parts(packed) == {"machine": "failed (1)"}, "nothing else is run"
    (line,) = (line for line in printed.splitlines() if line.startswith("gpu_session:"))
    assert line.startswith("gpu_session: no CUDA device (") and line.endswith("nothing is run; --rehearse needs none")
    assert "no CUDA device" in packed["report.html"].decode()
    assert json.loads(packed["machine.json"])["device"] is None


def test_each_unexpected_fact_is_reported_in_one_line() -> None:
    usual = {"device": "a GPU", "triton": "3.6.0", "shared_memory_per_block": 232_448}
    assert machine.remarks(usual) == []
    (line,) = machine.remarks(usual | {"triton": "3.5.0"})
    assert "3.5.0 is outside of the tested range" in line
    (line,) = machine.remarks(usual | {"shared_memory_per_block": 101_376})
    assert "a GPU has 101,376 bytes of shared memory per block" in line and "one pipeline stage fewer" in line
    (line,) = machine.remarks(usual | {"triton": None})
    assert "triton is not installed" in line


def test_limits_end_before_eight_minutes() -> None:
    """The budget covers all parts: each gets what is left at most, less what the report and the end may take."""
    text = SCRIPT.read_text()
    (budget,) = map(int, re.findall(r"SPECDEC_SESSION_SECONDS:-(\d+)", text))
    (grace,) = map(int, re.findall(r"^grace=(\d+)$", text, flags=re.MULTILINE))
    (reserve,) = map(int, re.findall(r"^reserve=(\d+)$", text, flags=re.MULTILINE))
    (report,) = map(int, re.findall(r"^  timeout --kill-after=\$grace (\d+) ", text, flags=re.MULTILINE))
    assert text.count("--kill-after=$grace") == text.count("timeout --kill-after") == 2
    assert reserve >= grace + report + grace + 2, "of the part that is ended last, of the report, and to pack"
    assert budget < 480


@pytest.mark.parametrize("command", COMMANDS)
def test_parts_that_do_not_end_leave_no_time_to_others(command: str, tmp_path: Path) -> None:
    stubborn = f"*) {STUBBORN.format(python=sys.executable, started=tmp_path / 'started')};;"
    started = time.monotonic()
    asked = session(command, tmp_path / "out", PYTHON=fake_python(tmp_path, stubborn), SPECDEC_SESSION_SECONDS="18")
    asked.communicate(timeout=60)
    assert time.monotonic() - started < 18 + 4, "on a machine that is busy with other tests"
    went = parts(results(tmp_path / "out"))
    assert went.pop("machine") == "passed" and went.pop("build") == "failed (137)"
    assert set(went.values()) == {"not run: no time left"} and asked.returncode == len(went) + 1


@pytest.mark.parametrize(("ended_by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_session_packs_its_results(ended_by: int, status: int, tmp_path: Path) -> None:
    found = {"device": "a GPU", "torch": "2", "steps": []}
    (tmp_path / "steps.json").write_text(json.dumps(found))
    stubborn = STUBBORN.format(python=sys.executable, started=tmp_path / "started")
    out = f'cp {tmp_path / "steps.json"} "$4/step-8b-eagle3.json"; {stubborn}'
    asked = session("steps", tmp_path / "out", PYTHON=fake_python(tmp_path, f"*benchmarks.step*) {out};;"))
    try:
        for _ in range(600):
            if (tmp_path / "started").exists():
                break
            time.sleep(0.05)
        before = results(tmp_path / "out")
        assert parts(before)["cache"] == "passed", "packed after every part, so that nothing is lost to a kill either"
        asked.send_signal(ended_by)
        printed, _ = asked.communicate(timeout=60)
    finally:
        asked.kill()
    assert asked.returncode == status
    packed = results(tmp_path / "out")
    assert parts(packed)["steps-8b"] == "interrupted" and "steps-1b" not in parts(packed)
    assert json.loads(packed["step-8b-eagle3.json"]) == found
    assert "interrupted" in packed["report.html"].decode() and f"results: {tmp_path}/out/results.tar.gz" in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_a_session_counts_the_parts_that_fail(command: str, tmp_path: Path) -> None:
    failing = '*"-m pytest"*|*benchmarks.kernels*|*benchmarks.step*) exit 3;;'
    asked = session(command, tmp_path / "out", PYTHON=fake_python(tmp_path, failing))
    asked.communicate(timeout=60)
    went = parts(results(tmp_path / "out"))
    failed = [name for name, result in went.items() if result == "failed (3)"]
    assert asked.returncode == len(failed) and len(failed) >= 3
    assert went["build"] == went["cache"] == "passed"
    assert json.loads(results(tmp_path / "out")["cache.json"]).keys() == {"held_before", "added", "compiled_later"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_rehearsal_runs_every_part_on_a_simulated_gpu(command: str, tmp_path: Path) -> None:
    from specdec_kernels import simulated_gpu

    if reason := simulated_gpu.unavailable_reason():
        pytest.skip(reason)
    asked = session(command, tmp_path / "out", "--rehearse", SPECDEC_GPU_CACHE=str(tmp_path / "none.tar.xz"))
    printed, wrong = asked.communicate(timeout=300)
    packed = results(tmp_path / "out")
    assert asked.returncode == 0, printed[-4000:] + wrong
    assert set(parts(packed).values()) == {"passed"}
    found = {name: json.loads(data) for name, data in packed.items() if name.endswith(".json")}
    expected = {
        "correctness": {"tests.json", "sanitize-memcheck.json", "sanitize-racecheck.json", "lab_draws.json"},
        "kernels": {"kernels.json", "ncu.json", "peers.json"},
        "steps": {"step-tiny-eagle3.json", "step-tiny-draft_model.json"},
    }[command]
    assert (
        set(found) == expected | {"machine.json", "cache.json"} and found["machine.json"]["device"] == "simulated sm_90"
    )
    page = packed["report.html"].decode()
    assert "cannot be shown" not in page and "simulated sm_90" in page
    assert "there is no" in packed["cache.log"].decode()
    if command == "correctness":
        assert found["tests.json"]["counts"].keys() == {"passed"}
    if command == "kernels":
        timed = {row["op"] for row in found["kernels.json"]["times"] if row["backend"] == "triton" and row["p10"]}
        assert timed == {"tree_attention", "distribution_stats"}
    if command == "steps":
        lines = found["step-tiny-eagle3.json"]["steps"]
        assert [line["acceptance"] for line in lines] == ["half", "none", "all", ""]
        assert {line["mode"] for line in lines} == {"graph"}, [line["explain"] for line in lines]

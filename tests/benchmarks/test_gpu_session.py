"""The parts of a GPU session that run without one: peers, the step benchmark, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report, step  # noqa: E402
from benchmarks.kernels.gpu import peers  # noqa: E402
from benchmarks.kernels.peers import PEERS  # noqa: E402
from specdec_kernels.samples import Sizes  # noqa: E402

SIZES = (Sizes(nodes=6, length=40, heads=4, kv_heads=2, width=16, vocab=200),)
HERE = {peer.name for peer in PEERS if not peer.gpu}


@pytest.mark.parametrize("op", sorted({peer.op for peer in PEERS}))
def test_peers_run_or_say_why_not(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row.backend: row for row in peers(op, torch.device("cpu"), 2, SIZES)}
    expected = {peer.name for peer in PEERS if peer.op == op}
    assert set(found) - expected == {name for name in found if name.startswith("ours (")} and expected <= set(found)
    for name in expected:
        if name in HERE:
            assert found[name].microseconds is not None and found[name].microseconds > 0, found[name].reason
        else:
            assert found[name].reason == "needs a GPU"
            assert f"{name}: skipped: needs a GPU" in capsys.readouterr().out or len(expected) > 1


def test_the_step_benchmark_and_the_report(tmp_path: Path) -> None:
    quick = ["--shape", "tiny", "--device", "cpu", "--steps", "3", "--prompt", "8", "--rows", "2", "--drafted", "2"]
    found = step.main([*quick, "--out", str(tmp_path)])
    assert [line["mode"] for line in found] == ["sync", "graph"]
    for line in found:
        assert line["step_us"] > 0 and line["target_us"] > 0 and line["draft_us"] > 0
        assert line["overhead_us"] == pytest.approx(line["step_us"] - line["target_us"] - line["draft_us"])
    assert json.loads((tmp_path / "step.json").read_text())["steps"] == found
    (tmp_path / "summary.tsv").write_text("build\tpassed\t3 s\n")
    text = report.page(tmp_path)
    assert "Steps" in text and "build" in text and "Kernels" not in text, "what is not there is left out"


def test_the_session_script_is_sound() -> None:
    script = ROOT / "benchmarks" / "gpu_session.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    limits = [int(line.split()[2]) for line in script.read_text().splitlines() if line.startswith("part ")]
    assert sum(limits) <= 530, "parts that all run into their limits still end within nine minutes"

"""The benchmark of engine steps: acceptance that is forced, and what a trace is reduced to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import step  # noqa: E402
from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.trace_summary import reduced, traced  # noqa: E402

QUICK = ["--shape", "tiny", "--device", "cpu", "--steps", "3", "--prompt", "8", "--rows", "2"]


def test_steps_with_a_draft_model(tmp_path: Path) -> None:
    found = step.main([*QUICK, "--drafted", "2", "--out", str(tmp_path)])
    assert [line["mode"] for line in found] == ["sync", "graph"]
    for line in found:
        assert line["step_us"] > 0 and line["target_us"] > 0 and line["draft_us"] > 0
        assert line["step_p10_us"] <= line["step_median_us"] <= line["step_p90_us"]
        assert line["overhead_us"] == pytest.approx(line["step_us"] - line["target_us"] - line["draft_us"])
    assert json.loads((tmp_path / "step-tiny-draft_model.json").read_text())["steps"] == found
    assert "draft_model" in report.page(tmp_path)


@pytest.mark.parametrize("drafter", step.DRAFTERS)
@pytest.mark.parametrize(("acceptance", "share"), [("none", 0.0), ("all", 1.0)])
def test_none_or_all_drafted_tokens_are_accepted(drafter: str, acceptance: str, share: float) -> None:
    for line in step.main([*QUICK, "--drafter", drafter, "--drafted", "3", "--acceptance", acceptance]):
        assert line["accepted_share"] == share and line["acceptance"] == acceptance


def test_half_of_the_drafted_tokens_are_expected_to_be_accepted() -> None:
    for drafted in (1, 4, 7):
        rate = step.rate_for_half(drafted)
        assert sum(rate**length for length in range(1, drafted + 1)) == pytest.approx(drafted / 2)
    many = [*QUICK[:4], "--steps", "100", "--prompt", "8", "--rows", "8", "--modes", "sync", "--acceptance", "half"]
    (line,) = step.main([*many, "--drafted", "4"])
    assert abs(line["accepted_share"] - 0.5) < 0.06, "of 800 chains; four standard deviations are 0.06"


def test_captured_steps_with_more_overhead_than_allowed_are_a_failure() -> None:
    with pytest.raises(
        SystemExit, match=r"1 CUDA-graph steps take more than -1e\+09 us beyond"
    ):  # whatever the clock says
        step.main([*QUICK, "--drafted", "2", "--most-overhead", "-1000000000"])


def test_a_line_that_fails_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = step.measure

    def measure(line: step.Line, *rest: Any) -> dict[str, Any]:
        if line.mode == "sync":
            raise RuntimeError("out of luck")
        return original(line, *rest)

    monkeypatch.setattr(step, "measure", measure)
    with pytest.raises(SystemExit, match="1 of 2 lines failed"):
        step.main([*QUICK, "--drafted", "2", "--out", str(tmp_path)])
    lines = json.loads((tmp_path / "step-tiny-draft_model.json").read_text())["steps"]
    assert [line.get("error") for line in lines] == ["RuntimeError: out of luck", None]
    assert "out of luck" in report.page(tmp_path)


def event(kind: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": duration}


def test_a_trace_is_reduced_to_kernels_busy_time_and_gaps() -> None:
    """Two steps: kernels that overlap count once as busy time, and what the host does is left out."""
    found = reduced(
        [
            event("kernel", "attend", 100, 10), event("kernel", "walk", 130, 10), event("cpu_op", "aten::add", 0, 500),
            event("gpu_memcpy", "copy", 115, 5), event("kernel", "attend", 104, 8), event("kernel", "attend", 139, 3),
            {"name": "a marker without a category", "ts": 0},
        ],
        2,
    )  # fmt: skip
    assert found is not None
    assert (found["kernels"], found["span_us"], found["largest_gap_us"]) == (2.5, 21, 10)
    assert found["busy_us"] == (12 + 5 + 12) / 2 and found["gap_us"] == (3 + 10) / 2
    assert found["longest"][0] == {"name": "attend", "count": 1.5, "us": 10.5}


def test_a_trace_without_a_kernel_says_nothing() -> None:
    assert reduced([event("cpu_op", "aten::add", 0, 5)], 1) is None
    assert traced(lambda: None, 1, torch.device("cpu")) is None

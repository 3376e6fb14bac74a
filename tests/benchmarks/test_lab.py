"""What times the lab: rows with a verdict beside every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lab_draws, lab_exact


def test_draws_are_timed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draws.json"
    few = ["--rules", "token", "replay", "--draws", "3000", "--vocab", "40", "--threads", "1", "--out", str(out)]
    lab_draws.main([*few, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text()) and found["vocab"] == 40 and found["environment"]["cores"]
    assert [(row["rule"], row["drafts"]) for row in found["rows"]] == [
        ("token", "2 nodes, drawn"),
        ("replay", "2 nodes, coupled"),
    ]
    assert all(row["lowest_p"] > 1e-4 and row["seconds"] >= 0 for row in found["rows"])


def test_the_exact_part_is_timed_and_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """greedy has no law to enumerate, and is quick."""
    out = tmp_path / "exact.json"
    lab_exact.main(["--rules", "greedy", "--out", str(out)])
    found = json.loads(out.read_text())
    assert "greedy, same keys:" in capsys.readouterr().out
    assert [row["part"] for row in found["rows"]] == ["same keys"] and found["rows"][0]["holds"]
    assert set(found["seconds"]) == set(found["cpu_seconds"]) == {"same keys"} and found["seconds"]["same keys"] > 0

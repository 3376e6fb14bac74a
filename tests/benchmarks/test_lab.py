"""What times the lab: rows with a verdict beside every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.lab import draws_time, exact_time, heads


def test_draws_are_timed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draws_time.json"
    few = ["--rules", "rejection", "replay", "--draws", "3000", "--vocab", "40", "--threads", "1", "--out", str(out)]
    draws_time.main([*few, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text()) and found["vocab"] == 40 and found["environment"]["cores"]
    assert [(row["rule"], row["drafts"]) for row in found["rows"]] == [
        ("rejection", "2 nodes, sampled"),
        ("replay", "2 nodes, coupled"),
    ]
    assert all(row["lowest_p"] > 1e-4 and row["seconds"] >= 0 for row in found["rows"])


def test_the_exact_part_is_timed_and_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """greedy has no distribution to enumerate, and is quick."""
    out = tmp_path / "exact_time.json"
    exact_time.main(["--rules", "greedy", "--out", str(out)])
    found = json.loads(out.read_text())
    assert "greedy, same keys:" in capsys.readouterr().out
    assert [row["part"] for row in found["rows"]] == ["same keys"] and found["rows"][0]["holds"]
    assert set(found["seconds"]) == set(found["cpu_seconds"]) == {"same keys"} and found["seconds"]["same keys"] > 0


def test_heads_are_judged_by_what_the_lab_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that does not hold has its row too, which says so. The lab itself: tests/commands/test_lab.py."""

    def lab(out: Path, **told: Any) -> None:
        drawn = {"acceptance_rate": 0.5, "certified_distance": 0.1, "row_error": 0.0}
        sampled = told["temperature"] > 0
        report = {
            **{name: told[name] for name in ("drafter", "rule", "temperature")},
            "model": "demo-target",
            "drafter_options": {},
            "seed": 0,
            "holds": not sampled,
            "greedy": [{"identical": each, "tokens": 16} for each in (True, not sampled)],
            "tests": [
                {"place": at, "p_value": p, "rejected": p < 0.01} for at, p in (("a", 0.4), ("a", 0.001), ("b", 0.2))
            ]
            if sampled
            else [],
            "summaries": [{"place": at, "draws": told["draws"], **drawn} for at in "ab"] if sampled else [],
        }
        (out / "report.json").write_text(json.dumps(report))
        print("what the command says is not shown")
        if sampled:
            raise typer.Exit(1)

    monkeypatch.setattr(heads, "lab", lab)
    out = tmp_path / "heads.json"
    heads.main(["--cases", "medusa, greedy", "eagle3, dynamic", "--draws", "700", "--out", str(out)])
    medusa, eagle3 = json.loads(out.read_text())["rows"]
    assert medusa["holds"] and medusa["greedy"] == {"texts": 2, "identical": 2, "tokens": 32} and medusa["draws"] == 0
    assert not eagle3["holds"] and eagle3["greedy"]["identical"] == 1 and eagle3["drafter"] == "eagle3"
    assert (eagle3["draws"], eagle3["tests"], eagle3["rejected"]) == (1400, 3, 1)
    assert [(place["place"], place["lowest_p"]) for place in eagle3["places"]] == [("a", 0.001), ("b", 0.2)]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 and "1 of 2 greedy texts identical; 1,400 draws, 3 tests, 1 rejected" in shown[1]

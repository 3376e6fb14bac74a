"""A part of the rows never takes the place of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.select_rows import RESULTS, named, where


def test_names_that_are_asked_for() -> None:
    names = {"ngram": 1, "suffix": 2, "rest": 3}
    assert named("", names) == [*names] and named("suf|re", names) == ["suffix", "rest"]
    with pytest.raises(SystemExit, match=r"--only: got 'stutter', which is part of no name; expected .*ngram, suffix"):
        named("stutter", names)


def test_committed_results_are_written_by_whole_runs_alone(tmp_path: Path) -> None:
    assert where(None, "", "x.json") == RESULTS / "x.json" and where(None, "ngram", "x.json") is None
    assert where(tmp_path / "new" / "y.json", "ngram", "x.json") == tmp_path / "new" / "y.json"
    assert (tmp_path / "new").is_dir()

"""A part of the rows never takes the place of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.select_rows import RESULTS, named, where


def test_names_that_are_asked_for() -> None:
    names = {"ngram": 1, "suffix": 2, "rest": 3}
    assert named("", names) == [*names] and named("suf|re", names) == ["suffix", "rest"]


def test_a_whole_title_selects_its_row_alone() -> None:
    names = ["forest of ngram", "ngram", "suffix", "suffix, warm"]
    assert named("ngram", names) == ["ngram"]
    assert named("ngr", names) == ["forest of ngram", "ngram"]
    assert named("suffix|gram", names) == ["forest of ngram", "ngram", "suffix"]
    assert named("suffix, warm|ngram", names) == ["ngram", "suffix, warm"]


@pytest.mark.parametrize(
    ("only", "unknown", "suggestion"),
    [("stutter", "stutter", ""), ("ngrma", "ngrma", "; did you mean 'ngram'?"), ("rest|stutter", "stutter", "")],
)
def test_unknown_titles_are_refused_with_all_titles(only: str, unknown: str, suggestion: str) -> None:
    with pytest.raises(SystemExit) as error:
        named(only, ["ngram", "suffix, warm", "rest"])
    first, *titles = str(error.value).splitlines()
    assert first == f"--only: got {unknown!r}; expected a title or part of one{suggestion}"
    assert titles == ["titles:", "  ngram", "  suffix, warm", "  rest"]


def test_committed_results_are_written_by_whole_runs_alone(tmp_path: Path) -> None:
    assert where(None, "", "x.json") == RESULTS / "x.json" and where(None, "ngram", "x.json") is None
    assert where(tmp_path / "new" / "y.json", "ngram", "x.json") == tmp_path / "new" / "y.json"
    assert (tmp_path / "new").is_dir()

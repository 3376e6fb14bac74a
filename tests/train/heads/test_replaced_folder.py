"""A trained head replaces the one before as a whole, wherever the program ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_fast.train.heads.run_checkpoint import replaced_folder


def head(place: Path, words: str) -> None:
    with replaced_folder(place) as folder:
        (folder / "head.txt").write_text(words)


def test_a_new_head_replaces_the_old_one(tmp_path: Path) -> None:
    head(tmp_path / "head", "first")
    head(tmp_path / "head", "second")
    assert (tmp_path / "head" / "head.txt").read_text() == "second" and len(list(tmp_path.iterdir())) == 1


def test_an_error_leaves_the_old_head(tmp_path: Path) -> None:
    head(tmp_path / "head", "first")
    with pytest.raises(RuntimeError, match="planted"), replaced_folder(tmp_path / "head"):
        raise RuntimeError("planted")
    assert (tmp_path / "head" / "head.txt").read_text() == "first"


def test_a_head_that_an_earlier_program_set_aside_comes_back(tmp_path: Path) -> None:
    head(tmp_path / "head", "first")
    (tmp_path / "head").rename(tmp_path / "head.old")  # a program ended between its two renames
    with pytest.raises(RuntimeError, match="planted"), replaced_folder(tmp_path / "head"):
        raise RuntimeError("planted")
    assert (tmp_path / "head" / "head.txt").read_text() == "first"

"""Progress in a pipe: what runs is named, and a time is shown once it is measured."""

from __future__ import annotations

import math

import pytest

from specdec_fast.train.heads.progress_bar import ProgressBar


def test_lines_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("medusa") as bar:
        bar.measuring(1, 3)
        bar.measuring(2, 3)
        bar(0.1, {"loss": 2.0}, math.nan)
        bar(0.2, {"loss": 2.0}, 30.4)
        bar(0.3, {"loss": 2.0}, 30.0)
        bar(1.0, {"loss": 1.5, "tokens_per_step": 1.25}, 2.0)
    assert capsys.readouterr().err.splitlines() == [
        "medusa: measuring on held-out text, block 1 of 3",
        "medusa: 20%, loss 2.000, 1.00 tokens per step, 30 s left",
        "medusa: 100%, loss 1.500, 1.25 tokens per step, 2 s left",
    ]

"""Arguments of several benchmarks: errors come before anything is measured."""

from __future__ import annotations

import argparse
from time import perf_counter, process_time

import pytest

from benchmarks.harness.arguments import CLOCKS, add_clock, add_models, clock_name


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_models(made)
    add_clock(made)
    return made


def test_models_are_names_with_places() -> None:
    asked = parser().parse_args(["--model", "a=folder/x=y", "--model", "b=hub/id"])
    assert asked.model == [("a", "folder/x=y"), ("b", "hub/id")]


@pytest.mark.parametrize("text", ["SmolLM2", "SmolLM2=", "=folder"])
def test_a_model_without_a_name_or_place_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--model", "a=b", "--model", text])
    assert f"--model: got '{text}'; expected NAME=PLACE" in capsys.readouterr().err


def test_processor_time_is_for_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser()
    plain, processor = (made.parse_args(["--model", "a=b", *more]) for more in ([], ["--processor-time"]))
    assert CLOCKS[clock_name(made, plain, [1, 2])] is perf_counter
    assert CLOCKS[clock_name(made, processor, [1])] is process_time
    with pytest.raises(SystemExit):
        clock_name(made, processor, [1, 2])
    assert "--processor-time: got --threads 1 2; expected --threads 1" in capsys.readouterr().err

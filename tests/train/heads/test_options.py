"""Options that commands share are written once and appear in each: their names, help and defaults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from specdec_fast.train import command
from specdec_fast.train.heads.options import TextOptions, TrainingOptions, expand_options


def small(seen: list[Any], **defaults: Any) -> Any:
    @expand_options(**defaults)
    def run(
        text: TextOptions, *, own: Annotated[int, typer.Option(help="Its own.")] = 3, training: TrainingOptions
    ) -> None:
        """Runs."""
        seen.append((text, own, training))

    return run


def test_fields_are_options_in_the_order_of_the_parameters() -> None:
    run = small([], length=64)
    names = list(inspect.signature(run).parameters)
    assert names[:2] == ["inputs", "model"] and names.index("temperature") + 1 == names.index("own")
    assert names.index("own") + 1 == names.index("steps") and run.__doc__ == "Runs."
    assert inspect.signature(run).parameters["length"].default == 64


def test_a_call_and_a_command_line_give_the_same_options() -> None:
    seen: list[Any] = []
    run = small(seen, batch=2)
    run([Path("a.txt")], steps=7, own=4)
    app = typer.Typer()
    app.command()(run)
    done = CliRunner().invoke(app, ["a.txt", "--steps", "7", "--own", "4"])
    assert done.exit_code == 0, done.output
    assert seen[0] == seen[1] == (TextOptions(inputs=[Path("a.txt")]), 4, TrainingOptions(steps=7, batch=2))


def test_unknown_defaults_are_refused() -> None:
    with pytest.raises(TypeError, match="run: got a default for steeps; expected "):
        small([], steeps=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'steeps'"):
        small([])(steeps=3)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("medusa", ("medusa-heads", "512", "0.001", "--tied", "--labels")),
        ("blockwise", ("blockwise-heads", "512", "0.001", "--inner", "--labels")),
        ("eagle", ("eagle-head", "2048", "3e-05", "0.0025", "--no-embedding", "--kv-heads")),
        ("eagle3", ("eagle3-head", "2048", "5e-05", "0.015", "--vocab", "--kv-heads")),
    ],
)
def test_every_command_has_the_shared_options_and_its_own(name: str, defaults: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(command.app, [name, "--help"], env={"COLUMNS": "140"}).output
    for words in ("--answer", "-T", "--mixed-precision", "--warm-up", "Share of the steps", "-t", *defaults):
        assert words in shown

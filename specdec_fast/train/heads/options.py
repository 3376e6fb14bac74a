"""What the commands that train heads are told: the options they share are fields of dataclasses, written once.

Tests: tests/train/heads/test_options.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

_DATA, _RUN = "Text", "Training"


@dataclass(frozen=True, slots=True)
class Text:
    """Whose head it is, what it is trained on, and where it goes."""

    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text: files or folders, .jsonl and .parquet by field. Default for demo-target: its own corpus."
        ),
    ] = None
    model: Annotated[str, typer.Option("--model", "-m", help="Target: a bundled name, a folder or a hub id.")] = (
        "demo-target"
    )
    out: Annotated[Path, typer.Option(help="Work folder; an interrupted run goes on from here.")] = Path("head")
    field: Annotated[
        str, typer.Option(help="Field of a JSONL line, or column of a Parquet file.", rich_help_panel=_DATA)
    ] = "text"
    answer: Annotated[
        int,
        typer.Option(
            help="Above 0: the texts are prompts, answered by the target with so many tokens.", rich_help_panel=_DATA
        ),
    ] = 0
    temperature: Annotated[
        float, typer.Option("--temperature", "-T", help="Of these answers.", rich_help_panel=_DATA)
    ] = 0.7


@dataclass(frozen=True, slots=True)
class Training:
    """How: settings of the loop by the names that `Settings` has, and what the machine is to do."""

    steps: Annotated[int, typer.Option(help="Optimiser steps.", rich_help_panel=_RUN)] = 1000
    batch: Annotated[int, typer.Option(help="Blocks per step and process.", rich_help_panel=_RUN)] = 8
    length: Annotated[int, typer.Option(help="Tokens per block.", rich_help_panel=_RUN)] = 512
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_RUN)] = 1e-3
    warm_up: Annotated[
        float, typer.Option(help="Share of the steps on which the rate rises.", rich_help_panel=_RUN)
    ] = 0.1
    measure_every: Annotated[int, typer.Option(help="Steps between measurements.", rich_help_panel=_RUN)] = 100
    saving: Annotated[
        float | None,
        typer.Option(
            help="Share of the time for checkpoints; 1: one behind every step (default: behind every step if writing "
            "one takes no longer than a step, else 0.05).",
            rich_help_panel=_RUN,
        ),
    ] = None
    mixed_precision: Annotated[str, typer.Option(help="no, bf16 or fp16: of the heads.", rich_help_panel=_RUN)] = "no"
    dtype: Annotated[str, typer.Option(help="Of the target while training.", rich_help_panel=_RUN)] = "float32"
    seed: Annotated[int, typer.Option(help="Of the order of the text.", rich_help_panel=_RUN)] = 0
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads.", rich_help_panel=_RUN)] = None


def spelled_out(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of a function: in place of a parameter whose type is a dataclass stand its fields, each as an option.

    defaults: of such fields, where they are others than the dataclass has. Raises TypeError for one that no field has.
    """

    def made(own: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(own, include_extras=True)
        groups = {name: hints[name] for name in inspect.signature(own).parameters if is_dataclass(hints[name])}
        parameters, named, kind = [], set(), inspect.Parameter.POSITIONAL_OR_KEYWORD
        for name, parameter in inspect.signature(own).parameters.items():
            if name not in groups:
                parameters.append(parameter.replace(kind=kind, annotation=hints[name]))
                continue
            types = get_type_hints(groups[name], include_extras=True)
            for field in fields(groups[name]):
                value = defaults.get(field.name, field.default)
                parameters.append(inspect.Parameter(field.name, kind, default=value, annotation=types[field.name]))
                named.add(field.name)
        if unknown := defaults.keys() - named:
            raise TypeError(f"{own.__name__}: got a default for {', '.join(unknown)}; expected {', '.join(named)}")
        signature = inspect.Signature(parameters)

        def command(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            told = bound.arguments
            made = {
                name: kind(**{each.name: told.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
            }
            own(**made, **told)

        command.__name__, command.__doc__, command.__module__ = own.__name__, own.__doc__, own.__module__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return made

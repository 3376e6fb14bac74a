"""Options that all commands for training heads share, as fields of dataclasses.

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
class TextOptions:
    """Target model, training text and work folder."""

    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files or folders with training text; .jsonl and .parquet files are read by --field "
            "(default for demo-target: its own corpus)."
        ),
    ] = None
    model: Annotated[str, typer.Option("--model", "-m", help="Target model: a bundled name, a folder or a hub id.")] = (
        "demo-target"
    )
    adapter: Annotated[
        str | None, typer.Option(help="PEFT adapter to merge into the target: a folder or a hub id.")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target on the hub.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with checkpoints.")
    ] = False
    out: Annotated[Path, typer.Option(help="Work folder; an interrupted run continues from it.")] = Path("head")
    field: Annotated[
        str,
        typer.Option(
            help="Field of a JSONL object, or column of a Parquet file, that holds the text.", rich_help_panel=_DATA
        ),
    ] = "text"
    answer: Annotated[
        int,
        typer.Option(
            help="Treat the texts as prompts and train on answers of the target of this many tokens; 0 "
            "trains on the texts.",
            rich_help_panel=_DATA,
        ),
    ] = 0
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Apply the model's chat template: each prompt is a question. Needs --answer.",
            rich_help_panel=_DATA,
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option("--temperature", "-T", help="Sampling temperature of the answers.", rich_help_panel=_DATA)
    ] = 0.7

    def check(self) -> None:
        """Checks the options before anything is loaded.

        Raises:
            ValueError: If they contradict each other.
        """
        from specdec_fast.loading import BUNDLED

        if self.answer < 0:
            raise ValueError(f"--answer: got {self.answer}; expected 0 (the texts themselves) or more")
        if self.chat and not self.answer:
            raise ValueError("--chat: got no --answer; expected the number of tokens of each answer, such as 512")
        if not self.inputs and self.model not in BUNDLED:
            raise ValueError(f"training text: got none for {self.model!r}; expected files or folders of text")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Hyperparameters of `Settings`, under the same names, and options of the machine."""

    steps: Annotated[int, typer.Option(help="Optimiser steps.", rich_help_panel=_RUN)] = 1000
    batch: Annotated[int, typer.Option(help="Blocks per step and process.", rich_help_panel=_RUN)] = 8
    length: Annotated[int, typer.Option(help="Tokens per block.", rich_help_panel=_RUN)] = 512
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=_RUN)] = 1e-3
    warm_up: Annotated[
        float, typer.Option(help="Share of the steps with a linear warm-up of the rate.", rich_help_panel=_RUN)
    ] = 0.1
    measure_every: Annotated[int, typer.Option(help="Steps between measurements.", rich_help_panel=_RUN)] = 100
    saving: Annotated[
        float | None,
        typer.Option(
            help="Share of the time that checkpoints may take; 1 writes one after every step (default: "
            "after every step if that takes no longer than a step, else 0.05).",
            rich_help_panel=_RUN,
        ),
    ] = None
    mixed_precision: Annotated[
        str, typer.Option(help="Mixed precision of the heads: no, bf16 or fp16.", rich_help_panel=_RUN)
    ] = "no"
    dtype: Annotated[str, typer.Option(help="Data type of the target during training.", rich_help_panel=_RUN)] = (
        "float32"
    )
    seed: Annotated[int, typer.Option(help="Seed of weights and of the order of the text.", rich_help_panel=_RUN)] = 0
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", help="Number of CPU threads.", rich_help_panel=_RUN)
    ] = None


def expand_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command in which every dataclass parameter is replaced by its fields as options.

    Args:
        defaults: Default values of fields that differ from those of the dataclass.

    Returns:
        A decorator of functions.

    Raises:
        TypeError: If no field has the name of a default.
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
            values = bound.arguments
            made = {
                name: kind(**{each.name: values.pop(each.name) for each in fields(kind)})
                for name, kind in groups.items()
            }
            own(**made, **values)

        command.__name__, command.__doc__, command.__module__ = own.__name__, own.__doc__, own.__module__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return made

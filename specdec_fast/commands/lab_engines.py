"""`specdec lab --engine`: tests the sampling of other engines. Tests: tests/commands/test_lab_engines.py."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec_fast.commands.json_output import print_json
from specdec_fast.lab.engines.settings import Setting, settings_of

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_fast.lab.engines.recording import Progress
    from specdec_fast.lab.engines.verdict import Row

DRAWS = 4000
_FILTERED = {"temperature": 0.9, "top_k": 8, "top_p": 0.9}
_UNFILTERED = {"temperature": 0.9, "top_k": 0, "top_p": 1.0}


def samplings_of(temperature: float | None, top_k: int, top_p: float) -> list[dict[str, float]]:
    """Returns the samplings to test: the requested one, or two by default.

    Args:
        temperature: Temperature, or None.
        top_k: Kept tokens; 0 keeps all.
        top_p: Kept probability.

    Raises:
        ValueError: If the temperature is 0: greedy texts are compared in any case.
    """
    if temperature is None and top_k == 0 and top_p == 1.0:
        return [dict(_UNFILTERED), dict(_FILTERED)]
    if temperature is not None and temperature <= 0:
        raise ValueError(
            f"--temperature with --engine: got {temperature:g}; expected a positive number; greedy texts are compared "
            "in any case"
        )
    return [{"temperature": 0.9 if temperature is None else temperature, "top_k": top_k, "top_p": top_p}]


def check_options(engine: str | None, setting: Sequence[str] | None, sampler: str | None, python: Path | None) -> None:
    """Checks options that belong together.

    Args:
        engine: Engine, or None.
        setting: Settings, or None.
        sampler: `module:factory`, or None.
        python: Interpreter, or None.

    Raises:
        ValueError: If one of them lacks another.
    """
    given = {"--setting": setting, "--sampler": sampler, "--python": python}
    if engine is None:
        for name, value in given.items():
            if value:
                raise ValueError(f"{name}: got it without --engine; expected --engine transformers, vllm or callable")
        return
    settings_of(engine, setting or ())
    if (engine == "callable") != bool(sampler):
        wanted = "--sampler MODULE:FACTORY with --engine callable"
        raise ValueError(f"--engine {engine}: got {'no ' if not sampler else ''}--sampler; expected {wanted}")
    if sampler and (sampler.count(":") != 1 or not all(sampler.split(":"))):
        raise ValueError(f"--sampler: got {sampler!r}; expected MODULE:FACTORY, such as my_engine:make_sampler")
    if python is not None and not python.exists():
        raise ValueError(f"--python: {python} does not exist; expected the interpreter of the engine's environment")


def run_settings(
    engine: str,
    names: Sequence[str],
    *,
    out: Path,
    python: Path | None,
    sampler: str | None,
    samplings: Sequence[Mapping[str, float]],
    draws: int,
    seed: int,
    as_json: bool,
    console: Console,
    progress: Progress,
) -> None:
    """Tests the settings of an engine one by one, and stores each as soon as it is tested.

    Args:
        engine: Engine.
        names: Settings; all without any.
        out: Folder of the results.
        python: Interpreter of the engine's environment; None for this one.
        sampler: `module:factory` of engine `callable`.
        samplings: Samplings to test.
        draws: Drawn texts under each sampling.
        seed: Seed of the first draw.
        as_json: Whether JSON is printed.
        console: Console for messages.
        progress: Shows the progress.

    Raises:
        Exit: With status 1 if a setting differs from the model's distribution, or if none ran.
    """
    from specdec_fast.lab.engines.table import add_rows, as_markdown
    from specdec_fast.lab.engines.verdict import DID_NOT_RUN, DIFFERS

    found: list[dict[str, Any]] = []
    try:
        for setting in settings_of(engine, names):
            rows = _rows(engine, setting, python, sampler, samplings, draws, seed, progress)
            new = [{**row.as_dict(), "date": date.today().isoformat()} for row in rows]
            found += new
            add_rows(out, new)
    except KeyboardInterrupt:
        console.print(f"specdec: interrupted; rows of {len(found)} tests are kept in {out}", soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json({"rows": found})
    else:
        print(as_markdown(found))
        print(f"\nresults: {out}")
    verdicts = [row["verdict"] for row in found]
    if DIFFERS in verdicts or set(verdicts) == {DID_NOT_RUN}:
        raise typer.Exit(1)


def _rows(
    engine: str,
    setting: Setting,
    python: Path | None,
    sampler: str | None,
    samplings: Sequence[Mapping[str, float]],
    draws: int,
    seed: int,
    progress: Progress,
) -> list[Row]:
    """Runs and tests one setting. An engine that cannot run gives rows with the reason."""
    from specdec_fast.lab.engines.recording import EngineFailedError, build_pair, installed_version, record
    from specdec_fast.lab.engines.verdict import Row, jobs_of, rows_of

    interpreter = sys.executable if python is None else str(python)
    more = {} if sampler is None else {"sampler": sampler}

    def shown(job: str, done: int, total: int) -> None:
        progress(f"{setting.name}: {job}", done, total)

    with tempfile.TemporaryDirectory(prefix="specdec-pairs-") as folder:
        try:
            shown("models", 0, 1)
            pair = build_pair(Path(folder), setting.pair, interpreter)
            jobs = jobs_of(setting, pair, samplings, draws, seed)
            answers = record(engine, setting, pair, jobs, python=interpreter, more=more, progress=shown)
            return rows_of(engine, setting, pair, samplings, answers)
        except EngineFailedError as error:
            versions = {} if engine == "callable" else installed_version(engine, interpreter)
            return [
                Row(engine, versions, setting.name, setting.summary, setting.own, dict(each), reason=str(error))
                for each in samplings
            ]

"""`specdec lab`: tests whether speculative decoding keeps the model's distribution, and writes a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.extras import require
from specdec_fast.lab import DRAFTERS

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_fast.commands.open_engine import Setup
    from specdec_fast.commands.prompts import Prompt
    from specdec_fast.engine.engine import Engine
    from specdec_fast.lab.run import Lab, Progress
    from specdec_fast.sampling.params import SamplingParams

_WORK = "Work"
_ENGINES = "Other engines"
_DRAWS = 1_000_000
_PROMPTS = 4
_LENGTHS = (16, 48, 96)
_ROWS = 8  # greedy texts decoded at once


def lab(
    out: Annotated[Path, typer.Option("--out", help="Folder of the report; draws stored in it are continued.")],
    model: options.Model = "demo-target",
    draft: options.DraftModel = None,
    drafter: Annotated[
        str | None,
        typer.Option(help=f"Drafter with a distribution of its own: {', '.join(DRAFTERS)}.", rich_help_panel="Models"),
    ] = None,
    drafter_option: options.DrafterOptions = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Verification rule under test, such as replay (default: rejection, or best with --drafter).",
            rich_help_panel="Models",
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            help="How draft tokens are selected: sampled or deterministic; on trees also hybrid, iid or "
            "without (replacement); coupled for replay (default: depends on the rule).",
            rich_help_panel=_WORK,
        ),
    ] = None,
    draft_tokens: options.DraftTokens = None,
    draws: Annotated[
        int | None,
        typer.Option(
            "--draws",
            "-N",
            help="Draws per text position (default: 1,000,000), or texts of another engine (4,000).",
            rich_help_panel=_WORK,
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", "-n", help="Number of prompts from the bundled workload (default: 4).", rich_help_panel=_WORK
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="File with your own prompts, as in `generate`.", rich_help_panel=_WORK),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Treat every line of the file as a prompt.", rich_help_panel=_WORK)
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            help="Enumerate the exact distributions of all rules and compare backends.", rich_help_panel=_WORK
        ),
    ] = True,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Check that known mistakes (mutants) are detected.", rich_help_panel=_WORK)
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded",
            help="Test the draws stored in this .npz instead of drawing; docs/concepts/losslessness.md "
            "describes its fields.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="File that accumulates the evidence of many runs.", rich_help_panel=_WORK),
    ] = None,
    other_engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Test the sampling of another engine instead: transformers, vllm or callable.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Setting of that engine; repeat it for several (default: all).", rich_help_panel=_ENGINES),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Interpreter in which that engine is installed (default: this one).", rich_help_panel=_ENGINES
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Factory of your own sampler, with --engine callable.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-T",
            help="Sampling temperature; 0 is greedy (default: 1, or 0.9 with --engine).",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Seed for all draws (default: 0).", rich_help_panel=_WORK)
    ] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Check that speculation keeps the model's distribution, and write an HTML report.

    The report has exact distributions, a million draws per position, greedy texts and plots. Needs the extra `lab`.
    """
    require("lab", "lab")
    from specdec_fast.commands import lab_engines, lab_summary, open_engine
    from specdec_fast.commands.terminal_output import make_console
    from specdec_fast.lab.run import Lab
    from specdec_fast.lab.sequential_test import Ledger
    from specdec_fast.lab.simulator import layout_for
    from specdec_fast.sampling.params import SamplingParams

    if draws is not None and draws < 1:
        raise ValueError(f"--draws: got {draws}; expected at least 1")
    if file is not None and (prompts is not None or recorded is not None):
        other = "recorded" if prompts is None else "prompts"
        raise ValueError(f"--file with --{other}: got both; expected one of them")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: got {out}, which is a file; expected a folder or a new name")
    lab_engines.check_options(other_engine, setting, sampler, python)
    console = make_console(stderr=True)
    if other_engine is not None:
        with _progress(console) as progress:
            lab_engines.run_settings(
                other_engine, setting or (), out=out, python=python, sampler=sampler, draws=draws or lab_engines.DRAWS,
                samplings=lab_engines.samplings_of(temperature, top_k, top_p), seed=1 if seed is None else seed,
                as_json=as_json, console=console, progress=progress,
            )  # fmt: skip
        return
    draws = _DRAWS if draws is None else draws
    temperature = 1.0 if temperature is None else temperature
    if pick is not None and (recorded is not None or temperature == 0):
        raise ValueError(
            "--pick: got it without sampled drafts of this run; drop --pick, or --recorded and --temperature 0"
        )
    if ledger is not None and seed is not None:
        raise ValueError(
            "--ledger with --seed: got both; expected one: a repeated seed counts its draws twice; drop --seed"
        )
    if ledger is not None and (recorded is not None or temperature == 0):
        raise ValueError(
            "--ledger: got it without sampled draws of this run; drop --ledger, or --recorded and --temperature 0"
        )
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max(_LENGTHS), seed=seed or 0
    )
    kept = Ledger.open(ledger)
    run = Lab(out, seed=kept.next_seed if ledger is not None else params.seed or 0)
    items = _items(prompts, file, lines)  # raises before models are loaded
    work = _Work(items, draws, exact, mutants, pick)
    with _progress(console) as progress:
        run.progress = progress
        try:
            if recorded is not None:
                _judge_recorded(run, recorded, work, console)
            else:
                setup = open_engine.resolve(
                    model=model, draft=draft, drafter=drafter, rule=rule or ("best" if drafter else "rejection"),
                    draft_tokens=draft_tokens, dtype=dtype, device=device, compile=False,
                    drafter_option=drafter_option,
                )  # fmt: skip
                _refuse(setup, params)
                open_engine.quiet()
                with console.status("loading models") if console.is_terminal else nullcontext():
                    rows = min(len(work.items), _ROWS)
                    engine = open_engine.open_engine(setup, threads=threads, max_rows=rows, temperature=temperature)
                if pick is not None:  # raises before anything is measured
                    layout_for(engine.rule, engine.target.vocab_size, pick)
                run.header = {
                    **setup.describe(engine),
                    "rule": engine.rule.name,
                    **({} if file is None else {"file": file}),
                    **work.as_dict(),
                    **_described(params),
                }
                run.header |= {"seed": run.seed, "versions": open_engine.versions()}
                run.notes.append(_why_rule(rule, drafter, engine))
                _note_replaced(run, console, () if ledger is None else ("seed",))
                _measure(run, engine, params, work, None if ledger is None else kept)
        except KeyboardInterrupt:
            _interrupted(run, work, out, console)
    lab_summary.finish(run, as_json, console)


class _Work:
    """The amount of work that the command line requests."""

    def __init__(
        self, items: list[tuple[str, Prompt]], draws: int, exact: bool, mutants: bool, pick: str | None
    ) -> None:
        self.items, self.draws, self.exact, self.mutants, self.pick = items, draws, exact, mutants, pick

    def as_dict(self) -> dict[str, Any]:
        picked = {} if self.pick is None else {"pick": self.pick}
        return {"draws": self.draws, "prompts": len(self.items), **picked}


def _items(prompts: int | None, file: str | None, lines: bool) -> list[tuple[str, Prompt]]:
    """Returns prompts with names: those of a file, or some of the bundled workload."""
    from specdec_fast.commands.prompts import bundled_workload, one_of_each, read_prompts

    if file is None:
        if lines:
            raise ValueError("--lines: got no --file; expected --file FILE, whose lines are prompts")
        count = _PROMPTS if prompts is None else prompts
        return [(item.id, item.prompt) for item in one_of_each(bundled_workload(), count)]
    stem = "stdin" if file == "-" else Path(file).stem
    return [(f"{stem}-{at}", prompt) for at, prompt in enumerate(read_prompts(None, file, lines), 1)]


def _refuse(setup: Setup, params: SamplingParams) -> None:
    """Raises ValueError if no draws are possible. Drafters of plugins are checked after they are loaded."""
    from specdec_fast.drafters import NO_DRAFTER, get_drafter
    from specdec_fast.rules import get_rule

    name = None if setup.drafter == NO_DRAFTER else setup.drafter
    built_in = name is not None and get_drafter(name).__module__.startswith("specdec_fast.")
    if name is None or (params.temperature > 0 and built_in and name not in DRAFTERS):
        raise ValueError(
            f"--drafter: got {name or 'none'}, which has no distribution of its own to draw from; expected "
            f"--draft MODEL, or one of {', '.join(DRAFTERS)}; to test draws of another program, use --recorded FILE"
        )
    if params.temperature > 0 and (reason := get_rule(setup.rule).why_not_sampling(params)) is not None:
        raise ValueError(reason)


def _why_rule(requested: str | None, drafter: str | None, engine: Engine) -> str:
    """Returns a note that names the rule under test and the reason."""
    from specdec_fast.rules import DEFAULT

    name = engine.rule.name
    if requested not in (None, "best"):
        return f"rule {name} is under test, as --rule says"
    if requested is None and drafter is None:
        return (
            f"rule {name} is under test, speculative sampling as in the papers and the figures; by default, texts are "
            f"generated by rule {DEFAULT}: test that with --rule {DEFAULT}"
        )
    return f"rule {name} is under test, which `best` picks ({engine.why_rule}); test another with --rule NAME"


def _note_replaced(run: Lab, console: Console, besides: Sequence[str] = ()) -> None:
    """Notes that the report in the folder has other settings and is replaced; stored draws remain."""
    from specdec_fast.lab.report import other_settings

    other = "; ".join(other_settings(run.out, run.header, besides))
    if other:
        words = f"{run.out} holds a report of other settings ({other}), which this run replaces when it ends"
        console.print(f"specdec: note: {words}; draws are kept; use another --out to keep both reports", soft_wrap=True)


def _described(params: SamplingParams) -> dict[str, Any]:
    """Returns the sampling parameters that are not neutral."""
    shown = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: value for name, value in shown.items() if value != neutral.get(name)}


def _measure(run: Lab, engine: Engine, params: SamplingParams, work: _Work, ledger: Any) -> None:
    """Runs all parts of the lab that the command line requests."""
    items = work.items
    rule = engine.rule
    if not rule.lossless:
        run.notes.append(f"rule {rule.name} is lossy by design: expect its distribution to be rejected")
    sampled = params.temperature > 0
    if not sampled:
        run.notes.append("temperature 0: every distribution is one token; nothing is drawn")
    if work.exact:
        run.run_exact()
    run.run_greedy(engine, items, _LENGTHS)
    if sampled:
        try:
            run.run_draws(engine, items, params, work.draws, work.pick)
        except ValueError as error:  # the results so far are still reported
            run.why_no_draws = str(error)
        else:
            run.run_acceptances()
            if ledger is not None:
                run.add_to_ledger(ledger)
    if work.mutants:
        run.run_mutants(work.draws)
    tokenizer = engine.tokenizer
    run.draw_figures(None if tokenizer is None else lambda token: str(tokenizer.decode([token])))


def _judge_recorded(run: Lab, path: Path, work: _Work, console: Console) -> None:
    """Tests recorded draws, and the mutants on request."""
    from specdec_fast.commands.open_engine import versions
    from specdec_fast.lab.foreign_samples import Recorded

    found = Recorded.load(path)
    run.header = {"recorded": str(path), "draws": len(found.tokens), "versions": versions()}
    _note_replaced(run, console)
    run.run_recorded(found)
    if work.mutants:
        run.run_mutants(work.draws)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Shows a progress bar on a terminal, and nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:<34.34}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _interrupted(run: Lab, work: _Work, out: Path, console: Console) -> None:
    """Tells how to continue after an interrupt, and exits with status 130."""
    total = work.draws * max(len(run.drawings), 1)
    words = f"specdec: interrupted after {run.draws_so_far:,} of {total:,} draws"
    if run.draws_so_far:
        words += f"; they are kept in {out / 'draws'}; run the same command again to continue"
        words += " (--no-exact skips the enumeration)"
    else:
        words += "; results before the draws are not kept (--no-exact skips the longest part of them)"
    console.print(words, soft_wrap=True)
    raise typer.Exit(130)

"""`specdec demo`: the bundled workload, plain and speculative, side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.commands import options

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_fast.commands.compare import Comparison

_DEFAULT_TEMPERATURES = (0.0, 1.0)


def demo(
    model: options.Model = "demo-target",
    draft: options.DraftModel = None,
    drafter: options.DrafterName = None,
    rule: options.RuleName = "replay",
    draft_tokens: options.DraftTokens = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", "-T", help="May be repeated (default: 0 and 1).", rich_help_panel="Workload"
        ),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option("--prompts", "-n", help="Prompts of the bundled workload.", rich_help_panel="Workload"),
    ] = 4,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens per text.", rich_help_panel="Workload")
    ] = 64,
    repeats: Annotated[
        int,
        typer.Option("--repeats", help="Runs per prompt; their median counts.", rich_help_panel="Workload"),
    ] = 3,
    seed: Annotated[
        int, typer.Option("--seed", "-s", help="Seed of all prompts.", rich_help_panel="Workload")
    ] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    compile: options.Compile = False,
    as_json: options.Json = False,
) -> None:
    """See speculative decoding work: text coloured by who wrote it, speed with and without, same or not."""
    from specdec_fast.commands import opening
    from specdec_fast.commands.prompts import bundled_workload, one_of_each
    from specdec_fast.commands.show import make_console

    items = one_of_each(bundled_workload(), prompts)
    if repeats < 1:
        raise ValueError(f"--repeats: got {repeats}; expected at least 1")
    setup = opening.resolve(
        model=model,
        draft=draft,
        drafter=drafter,
        rule=rule,
        draft_tokens=draft_tokens,
        dtype=dtype,
        device=device,
        compile=compile,
    )
    if setup.drafter is None:
        raise ValueError(
            "demo: got no drafter to compare with; pass --draft MODEL or --drafter NAME (for example ngram)"
        )
    from specdec_fast.sampling import SamplingParams

    chosen = temperature or ([0.0] if rule == "greedy" else list(_DEFAULT_TEMPERATURES))
    params = [SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed) for t in chosen]
    out, err = make_console(), make_console(stderr=True)
    opening.quiet()
    with err.status("loading models") if err.is_terminal else _nothing():
        engine = opening.open_engine(setup, threads=threads, max_rows=1)
    import torch

    from specdec_fast.commands.demo_view import print_conclusion, print_title

    header = {
        **setup.describe(),
        "draft_tokens": engine.drafter.num_draft_tokens,
        "threads": torch.get_num_threads(),
    }
    if not as_json:
        print_title(out, header)
    done, interrupted = _measure(engine, items, params, repeats, compile, None if as_json else out, err)
    if as_json:
        print(
            json.dumps(
                _report(done, header, chosen, repeats, max_new_tokens, seed), indent=2, ensure_ascii=False
            )
        )
    elif done:
        print_conclusion(out, done, header)
    if interrupted:
        err.print(
            "interrupted: "
            + (f"{len(done)} comparisons were finished" if done else "nothing was measured yet")
        )
        raise typer.Exit(130)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _measure(
    engine: Any, items: Any, params: Any, repeats: int, compiled: bool, out: Console | None, err: Console
) -> tuple[list[Comparison], bool]:
    """All comparisons, printed as they come when there is an `out`; and whether Ctrl-C ended them early."""
    from dataclasses import replace

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from specdec_fast.commands.compare import Comparer
    from specdec_fast.commands.demo_view import print_text

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task("warming up", total=len(items) * len(params) * repeats * 2 + 2)
    comparer = Comparer(engine, tick=lambda: bar.advance(task))
    done: list[Comparison] = []
    try:
        bar.start()
        short = (
            params[0] if compiled else replace(params[0], max_new_tokens=min(16, params[0].max_new_tokens))
        )
        comparer.warm_up(items[0], short)
        for each in params:
            bar.update(
                task, description="greedy" if each.temperature == 0 else f"temperature {each.temperature:g}"
            )
            for comparison in comparer.compare(items, each, repeats):
                done.append(comparison)
                if out is not None:
                    bar.stop()
                    print_text(out, comparison, engine)
                    bar.start()
    except KeyboardInterrupt:
        return done, True
    finally:
        bar.stop()
    return done, False


def _report(
    done: list[Comparison],
    header: dict[str, Any],
    temperatures: list[float],
    repeats: int,
    max_new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """The JSON object: totals, what was run, and every comparison."""
    from specdec_fast.commands.compare import is_replaying, summary
    from specdec_fast.commands.opening import versions

    groups = {t: [each for each in done if each.temperature == t] for t in temperatures}
    return {
        **(summary(done) if done else {}),
        "identical_expected": all(is_replaying(header["rule"], t) for t in temperatures),
        **header,
        "temperature": temperatures,
        "prompts": len({each.item.id for each in done}),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "seed": seed,
        "versions": versions(),
        "per_temperature": [{"temperature": t, **summary(group)} for t, group in groups.items() if group],
        "per_prompt": [each.as_dict() for each in done],
    }

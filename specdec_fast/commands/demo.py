"""`specdec demo`: the bundled workload, plain and speculative, side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.commands import options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
        typer.Option("--temperature", "-T", help="May be repeated (default: 0 and 1).", rich_help_panel="Workload"),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", "-n", help="Prompts of the bundled workload.", rich_help_panel="Workload")
    ] = 4,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens per text.", rich_help_panel="Workload")
    ] = 64,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs per prompt; their median counts.", rich_help_panel="Workload")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed of all prompts.", rich_help_panel="Workload")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    compile: options.Compile = False,
    as_json: options.Json = False,
) -> None:
    """See speculative decoding work: text coloured by who wrote it, speed with and without, and whether both agree."""
    from specdec_fast.commands import session
    from specdec_fast.commands.prompts import bundled_workload, one_of_each
    from specdec_fast.commands.show import make_console

    items = one_of_each(bundled_workload(), prompts)
    if repeats < 1:
        raise ValueError(f"--repeats: got {repeats}; expected at least 1")
    setup = session.resolve(
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
        raise ValueError("demo: got no drafter to compare with; pass --draft MODEL or --drafter NAME (for example ngram)")
    from specdec_fast.sampling import SamplingParams

    chosen = temperature or ([0.0] if rule == "greedy" else list(_DEFAULT_TEMPERATURES))
    params = [SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed) for t in chosen]
    out, err = make_console(), make_console(stderr=True)
    session.quiet()
    with err.status("loading models") if err.is_terminal else _nothing():
        engine = session.open_engine(setup, threads=threads, max_rows=1)
    import torch

    header = {**setup.describe(), "draft_tokens": engine.drafter.num_draft_tokens, "threads": torch.get_num_threads()}
    if not as_json:
        out.print(_title(header))
    done, interrupted = _measure(engine, items, params, repeats, compile, None if as_json else out, err)
    if as_json:
        print(json.dumps(_report(done, header, chosen, repeats, max_new_tokens, seed), indent=2, ensure_ascii=False))
    elif done:
        _conclude(out, done, header)
    if interrupted:
        err.print("interrupted: " + (f"{len(done)} comparisons were finished" if done else "nothing was measured yet"))
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

    from specdec_fast.commands.compare import Comparer, is_replaying

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task("warming up", total=len(items) * len(params) * repeats * 2 + 2)
    comparer = Comparer(engine, tick=lambda: bar.advance(task))
    done: list[Comparison] = []
    try:
        bar.start()
        short = params[0] if compiled else replace(params[0], max_new_tokens=min(16, params[0].max_new_tokens))
        comparer.warm_up(items[0], short)
        for each in params:
            bar.update(task, description="greedy" if each.temperature == 0 else f"temperature {each.temperature:g}")
            for comparison in comparer.compare(items, each, repeats):
                done.append(comparison)
                if out is not None:
                    bar.stop()
                    _print_text(out, comparison, engine, is_replaying(engine.rule.name, each.temperature))
                    bar.start()
    except KeyboardInterrupt:
        return done, True
    finally:
        bar.stop()
    return done, False


def _title(header: dict[str, Any]) -> Text:
    from rich.text import Text

    by = header["draft"] or header["drafter"]
    text = Text()
    text.append(f"{header['model']}", "bold")
    text.append(" drafted for by ")
    text.append(f"{by}", "bold")
    text.append(f", {header['draft_tokens']} tokens ahead", "")
    text.append(f"\nrule {header['rule']}, {header['dtype']}, {header['device']}, {header['threads']} threads, one request", "dim")
    return text


def _speeds(plain: float, fast: float) -> str:
    return f"{plain:.0f} → {fast:.0f} tokens/s, {fast / plain:.2f}x"


def _verdict(comparison: Comparison, replaying: bool) -> tuple[str, str]:
    """Words and style for "are the texts the same?"."""
    if comparison.identical:
        return "same text as plain decoding", "green"
    if not replaying:
        return "another text of the same distribution", ""
    words = f"texts part at token {comparison.first_difference}"
    if comparison.gap is not None:
        words += f" (scores {abs(comparison.gap):.1e} apart)"
    return words, "red"


def _print_text(out: Console, comparison: Comparison, engine: Any, replaying: bool) -> None:
    """One prompt: where it ends, how the models went on, and the numbers."""
    from rich.padding import Padding
    from rich.text import Text

    from specdec_fast.commands.show import Painter, harmless, paint

    mode = "greedy" if comparison.temperature == 0 else f"temperature {comparison.temperature:g}"
    out.print(Text.assemble("\n", (comparison.item.id, "bold"), f"  {mode}"))
    tail = "\n".join(comparison.item.prompt.splitlines(keepends=True)[-2:][0:]) if False else _tail(comparison.item.prompt)
    body = Text(harmless(tail), "dim")
    body.append_text(paint(Painter(comparison.speculative, engine.tokenizer).fresh()))
    out.print(Padding(body, (0, 0, 0, 2)))
    words, style = _verdict(comparison, replaying)
    numbers = _speeds(comparison.plain_speed, comparison.speculative_speed)
    stats = comparison.speculative.stats
    out.print(Text.assemble(f"{numbers}, tau {stats.tau:.2f}, alpha {stats.mean_alpha:.2f}, ", (words, style)), style="")


def _tail(prompt: str, limit: int = 100) -> str:
    """The last line of a prompt, or its end, marked as such."""
    last = prompt.rstrip("\n").rpartition("\n")[2]
    tail = prompt[prompt.rindex(last) :] if last else prompt
    if len(tail) > limit:
        tail = tail[-limit:]
        tail = tail[tail.find(" ") + 1 :]
        return f"… {tail}"
    return tail


def _table(done: list[Comparison], rule: str) -> Table:
    from rich import box
    from rich.table import Table

    from specdec_fast.commands.compare import is_replaying, summary

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("prompt", "all")
    total = summary(done)
    table.add_column("T", "")
    for title, key, form in _COLUMNS:
        table.add_column(title, format(total[key], form), justify="right")
    table.add_column("same text", "", justify="right")
    for each in done:
        numbers = summary([each])
        same = "yes" if each.identical else "no" if is_replaying(rule, each.temperature) else "same law"
        table.add_row(
            each.item.id, f"{each.temperature:g}", *(format(numbers[key], form) for _, key, form in _COLUMNS), same
        )
    return table


_COLUMNS = (
    ("plain tok/s", "plain_tokens_per_s", ".1f"),
    ("speculative tok/s", "speculative_tokens_per_s", ".1f"),
    ("speed-up", "speedup", ".2f"),
    ("tau", "tau", ".2f"),
    ("alpha", "alpha", ".2f"),
    ("distinct-4", "distinct_4", ".2f"),
)


def _conclude(out: Console, done: list[Comparison], header: dict[str, Any]) -> None:
    """Legend, table and one sentence."""
    from specdec_fast.commands.compare import is_replaying, summary
    from specdec_fast.commands.show import legend

    out.print()
    out.print(legend([origin for each in done for origin in each.speculative.origins]))
    out.print(_table(done, header["rule"]))
    total = summary(done)
    bound = [each for each in done if is_replaying(header["rule"], each.temperature)]
    same = sum(each.identical for each in bound)
    texts = f"{same} of {len(bound)} texts identical to plain decoding" if bound else "same law, other draws"
    out.print(f"{_speeds(total['plain_tokens_per_s'], total['speculative_tokens_per_s'])}; {texts}", style="bold")
    out.print("tau: tokens per target pass. alpha: share of tested draft tokens accepted.", style="dim")


def _report(
    done: list[Comparison], header: dict[str, Any], temperatures: list[float], repeats: int, max_new_tokens: int, seed: int
) -> dict[str, Any]:
    """The JSON object: totals, what was run, and every comparison."""
    from specdec_fast.commands.compare import is_replaying, summary
    from specdec_fast.commands.session import versions

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

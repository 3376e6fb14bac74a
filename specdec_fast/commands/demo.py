"""`specdec demo`: the bundled workload, plain and speculative, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.commands import options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from specdec_fast.commands.demo_comparison import Comparison
    from specdec_fast.commands.prompts import WorkItem
    from specdec_fast.engine.engine import Engine
    from specdec_fast.sampling.params import SamplingParams

# defaults of --repeats: at most 3 rounds, and fewer if they would take longer than 10 s
_MOST_REPEATS, _BUDGET_SECONDS = 3, 10.0
_DEFAULT_TEMPERATURES = (0.0, 1.0)


def demo(
    model: options.Model = "demo-target",
    draft: options.DraftModel = None,
    drafter: options.DrafterName = None,
    drafter_option: options.DrafterOptions = None,
    rule: options.RuleName = "replay",
    draft_tokens: options.DraftTokens = None,
    budget: options.BudgetName = "fixed",
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            "-T",
            help="Sampling temperature; may be repeated (default: 0 and 1).",
            rich_help_panel="Workload",
        ),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts", "-n", help="Number of prompts from the bundled workload.", rich_help_panel="Workload"
        ),
    ] = 4,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", help="Maximum number of new tokens per prompt.", rich_help_panel="Workload"),
    ] = 48,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            help="Measurements per prompt (default: 1 to 3, depending on speed).",
            rich_help_panel="Workload",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed for all prompts.", rich_help_panel="Workload")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    compile: options.Compile = False,
    fused_forward: options.FusedForward = None,
    as_json: options.Json = False,
) -> None:
    """Run the bundled workload with and without speculation: coloured text, speed and identity of the results."""
    from specdec_fast.commands import open_engine
    from specdec_fast.commands.json_output import print_json
    from specdec_fast.commands.prompts import bundled_workload, one_of_each
    from specdec_fast.commands.terminal_output import make_console

    items = one_of_each(bundled_workload(), prompts)
    if repeats is not None and repeats < 1:
        raise ValueError(f"--repeats: got {repeats}; expected at least 1")
    setup = open_engine.resolve(
        model=model,
        draft=draft,
        drafter=drafter,
        drafter_option=drafter_option,
        rule=rule,
        draft_tokens=draft_tokens,
        dtype=dtype,
        device=device,
        compile=compile,
        fused_forward=fused_forward,
        budget=budget,
    )
    from specdec_fast.commands.sampling_options import check_length
    from specdec_fast.sampling.params import SamplingParams

    check_length(max_new_tokens)
    temperatures = temperature or ([0.0] if rule == "greedy" else list(_DEFAULT_TEMPERATURES))
    params = [SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed) for t in temperatures]
    out, err = make_console(), make_console(stderr=True)
    open_engine.quiet()
    with err.status("loading models") if err.is_terminal else nullcontext():
        same = temperatures[0] if len(set(temperatures)) == 1 else None
        engine = open_engine.open_engine(setup, threads=threads, max_rows=1, temperature=same)
    if engine.drafter is None:
        raise ValueError(
            "demo: got no drafter to compare with; pass --draft MODEL or --drafter NAME (for example ngram)"
        )
    if engine.tokenizer is None:
        raise ValueError(
            f"demo: got {setup.model!r}, which has no tokenizer; expected one, for the workload is text; put its files "
            "into the folder of the model"
        )
    longest = max(len(engine.encode(item.prompt)) for item in items)
    note = open_engine.short_context(engine, longest, max_new_tokens)
    if note is not None:
        err.print(f"specdec: note: {note}", soft_wrap=True)
    measured = _Measurement(engine, items, params, repeats, setup.describe(engine))
    measured.run(None if as_json else out, err)
    if as_json:
        print_json(measured.report())
    if measured.interrupted:
        err.print(f"specdec: interrupted after {len(measured.done)} of {len(items) * len(params)} texts")
        raise typer.Exit(130)
    broken = measured.broken_promises()
    if broken:
        err.print(
            f"specdec: {', '.join(broken)}: the text differs from plain decoding; in {dtype} both must be equal; "
            "please report it with the output of `specdec info`"
        )
        raise typer.Exit(1)


class _Measurement:
    """All comparisons of one call. Ctrl-C keeps the finished ones in `done`."""

    def __init__(
        self,
        engine: Engine,
        items: list[WorkItem],
        params: list[SamplingParams],
        repeats: int | None,
        setup: dict[str, Any],
    ) -> None:
        import torch

        self.engine, self.items, self.params, self.repeats = engine, items, params, repeats
        self.done: list[Comparison] = []
        self.interrupted = False
        ahead = getattr(engine.drafter, "num_draft_tokens", None)
        self.header = {**setup, "draft_tokens": ahead, "threads": torch.get_num_threads()}

    def run(self, out: Console | None, err: Console) -> None:
        """Measures with a progress bar on `err`, and prints every text to `out` once it is known."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from specdec_fast.commands import demo_view

        if out is not None:
            demo_view.print_title(out, self.header)
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        bar.start()
        try:
            for comparison in self._compare(bar):
                self.done.append(comparison)
                if out is not None:
                    bar.stop()  # two consoles on one terminal take turns
                    demo_view.print_text(out, comparison, self.engine)
                    bar.start()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            bar.stop()
        if out is not None and self.done:
            demo_view.print_conclusion(out, self.done, self.header)

    def _compare(self, bar: Progress) -> Iterator[Comparison]:
        from specdec_fast.commands.demo_comparison import Comparer

        texts = len(self.items) * len(self.params)
        task = bar.add_task("warming up", total=None)
        comparer = Comparer(self.engine, tick=lambda: bar.advance(task))
        seconds = comparer.warm_up(self.items[0], self.params[0])
        if self.repeats is None:
            self.repeats = max(1, min(_MOST_REPEATS, int(_BUDGET_SECONDS / (seconds * texts))))
        bar.update(task, completed=0, total=2 * self.repeats * texts)
        for params in self.params:
            greedy = params.temperature == 0
            bar.update(task, description="greedy" if greedy else f"temperature {params.temperature:g}")
            yield from comparer.compare(self.items, params)
        # Rounds over all texts instead of repeats of each, so that a burst of other load affects one round only.
        for round_ in range(1, self.repeats):
            bar.update(task, description=f"measuring again ({round_ + 1} of {self.repeats})")
            comparer.repeat(self.done)

    def broken_promises(self) -> list[str]:
        """Lists prompts whose text had to equal plain decoding's and does not; none in half precision."""
        from specdec_fast.commands.demo_comparison import is_replaying

        if self.header["dtype"] != "float32":
            return []
        bound = [each for each in self.done if is_replaying(self.header["rule"], each.temperature)]
        return [f"{each.item.id} at T = {each.temperature:g}" for each in bound if not each.identical]

    def report(self) -> dict[str, Any]:
        """Returns the JSON object: totals, settings, and every comparison."""
        from specdec_fast.commands.demo_comparison import is_replaying, summary
        from specdec_fast.commands.open_engine import versions

        temperatures = [params.temperature for params in self.params]
        groups = {t: [each for each in self.done if each.temperature == t] for t in temperatures}
        return {
            **summary(self.done),
            "identical_expected": all(is_replaying(self.header["rule"], t) for t in temperatures),
            **self.header,
            "temperature": temperatures,
            "prompts": len({each.item.id for each in self.done}),
            "max_new_tokens": self.params[0].max_new_tokens,
            "repeats": self.repeats,
            "seed": self.params[0].seed,
            "versions": versions(),
            "per_temperature": [{"temperature": t, **summary(own)} for t, own in groups.items() if own],
            "per_prompt": [each.as_dict() for each in self.done],
        }

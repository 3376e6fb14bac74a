"""Command line of `specdec train`: the demo pair here, heads in the commands of `train/heads`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.train.heads.eagle_command import eagle, eagle3
from specdec_fast.train.heads.parallel_command import blockwise, medusa

if TYPE_CHECKING:
    from specdec_fast.train.demo_pair.recipe import Recipe

_TARGET_TOKENS, _DRAFT_TOKENS, _HYBRID_TOKENS = 6_000_000, 40_000_000, 3_000_000

app = typer.Typer(help="Train the bundled pair, or heads for any model.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Train the bundled pair, or heads for any model."""


app.command()(blockwise)
app.command()(eagle)
app.command()(eagle3)
app.command()(medusa)


class _Progress:
    """A progress bar on a terminal, and a line every few seconds in a pipe."""

    def __init__(self, every: float = 10.0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.live = sys.stdout.isatty()
        self.every, self.last = every, 0.0
        self.tasks: dict[Any, Any] = {}
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f}%"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            disable=not self.live,
        )

    def __call__(self, stage: str, share: float, loss: float, tokens: int, rate: float, left: float) -> None:
        """Shows the progress of a stage."""
        note = f"{tokens:,} tokens" + (f", loss {loss:.4f}" if loss == loss else "")
        note += f", {rate:,.0f} tokens/s" if rate == rate else ""
        if self.live:
            if stage not in self.tasks:
                self.tasks[stage] = self.bar.add_task(stage, total=1.0, note="")
            self.bar.update(self.tasks[stage], completed=share, note=note)
        elif time.monotonic() - self.last > self.every or share >= 1.0:
            self.last = time.monotonic()
            ends = f", {left:.0f} s left" if left == left else ""
            print(f"{stage} {share:.1%}: {note}{ends}", flush=True)


@app.command("demo-pair")
def demo_pair(
    out: Annotated[
        Path | None,
        typer.Option(help="Work folder; an interrupted run continues from it (default: demo-pair or demo-hybrid)."),
    ] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Train the hybrid target, from the bundled pair, and nothing else.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Training time without other stages; replaces the numbers of tokens.")
    ] = None,
    target_tokens: Annotated[
        int | None,
        typer.Option(help=f"Training tokens of the target (default: {_TARGET_TOKENS:,}; hybrid: {_HYBRID_TOKENS:,})."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(help=f"Distillation tokens of the draft model (default: {_DRAFT_TOKENS:,}; not with --hybrid)."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Number of CPU threads; 0 keeps PyTorch's default.")] = 0,
    workers: Annotated[
        int, typer.Option(help="Number of training processes with one thread each; 1 uses --threads.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    bfloat16: Annotated[
        bool | None,
        typer.Option("--bf16/--no-bf16", help="Multiply matrices in bfloat16 (default: if the CPU supports it)."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the models with torch.compile.")
    ] = True,
    install: Annotated[bool, typer.Option(help="Replace the bundled models with the result.")] = False,
) -> None:
    """Train tokenizer, target and draft model of the demo pair on the text of this machine (CPU, resumable).

    With --hybrid, distil the bundled target into a hybrid one, which shares its tokenizer and draft model.
    """
    import torch
    from transformers.utils import logging

    from specdec_fast.train.demo_pair.hybrid_pipeline import ASSETS, install_hybrid, run_hybrid
    from specdec_fast.train.demo_pair.pipeline import install as install_pair
    from specdec_fast.train.demo_pair.pipeline import run
    from specdec_fast.train.demo_pair.recipe import HybridRecipe, hybrid_timed, hybrid_tokened, timed, tokened

    out = out or Path("demo-hybrid" if hybrid else "demo-pair")
    target_tokens = target_tokens if target_tokens is not None else _HYBRID_TOKENS if hybrid else _TARGET_TOKENS
    if hybrid and draft_tokens is not None:
        raise ValueError(f"--draft-tokens: got {draft_tokens} with --hybrid; expected neither, since its draft is kept")
    if hybrid and workers > (most := HybridRecipe().contexts_per_step):
        raise ValueError(f"--workers: got {workers} with --hybrid; expected at most {most}, the contexts of a step")
    draft_tokens = draft_tokens if draft_tokens is not None else _DRAFT_TOKENS
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes: got {minutes}; expected more than 0")
    if min(target_tokens, draft_tokens, workers) < 1 or threads < 0:
        raise ValueError(
            f"--target-tokens, --draft-tokens, --workers, --threads: got {target_tokens}, {draft_tokens}, {workers}, "
            f"{threads}; expected at least 1, and of threads at least 0"
        )
    if threads:
        torch.set_num_threads(threads)
    if bfloat16 is None:
        able = torch.cpu.get_capabilities()
        bfloat16 = bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    how: dict[str, Any] = {"seed": seed, "compiled": compiled, "workers": workers, "bfloat16": bfloat16}
    recipe: Recipe
    if hybrid:
        recipe = hybrid_timed(minutes) if minutes else hybrid_tokened(target_tokens)
    else:
        recipe = timed(minutes) if minutes else tokened(target_tokens, draft_tokens)
    recipe = dataclasses.replace(recipe, **how)
    logging.disable_progress_bar()  # this command has its own
    progress = _Progress()
    say = progress.bar.console.print if progress.live else print
    try:
        with progress.bar:
            if isinstance(recipe, HybridRecipe):
                numbers = run_hybrid(recipe, out, progress, say=say)
            else:
                numbers = run(recipe, out, progress, say=say)
    except KeyboardInterrupt:
        print(
            f"specdec: interrupted; finished work is kept in {out}; run the same command again to continue",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    alpha = numbers["alpha_held_out"]["all"]["alpha"]
    bits = numbers["bits_per_byte"]["hybrid" if hybrid else "target"]["all"]
    typer.echo(f"alpha {alpha:.3f}, target {bits:.3f} bits per byte; written to {out / 'export'}")
    if install:
        (install_hybrid if hybrid else install_pair)(out, ASSETS)
        typer.echo(f"installed into {ASSETS}")
        if not hybrid:
            typer.echo("demo-hybrid still belongs to the pair before; train it again with --hybrid --install")

"""`specdec tune layers`: selects the sub-blocks that drafter layer_skip skips, by measurement."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json
from specdec_fast.commands.tune_head_layers import head_layers
from specdec_fast.commands.tune_tree import tree
from specdec_fast.extras import require

if TYPE_CHECKING:
    from specdec_fast.targets.skipped_layers import SkippedLayers
    from specdec_fast.tune.skipped_layers_search import Trial

app = typer.Typer(help="Tune layers, trees and heads of a drafter by measurement.", no_args_is_help=True)
METHODS = ("bayes", "similarity")
_PROMPTS = 8  # prompts of the bundled workload, and rows for hidden-state similarity


@app.callback()
def main() -> None:
    """Tune layers, trees and heads of a drafter by measurement."""


app.command()(tree)
app.command()(head_layers)


@app.command()
def layers(
    model: options.Model = "demo-target",
    method: Annotated[
        str,
        typer.Option(
            help="bayes: Bayesian optimisation; similarity: rank layers by hidden states and time one "
            "selection per size."
        ),
    ] = "bayes",
    trials: Annotated[int, typer.Option(help="Maximum number of selections to measure, including earlier runs.")] = 60,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="File with prompts, as in `generate`, without sampling parameters (default: bundled prompts).",
        ),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Treat every line of the file as a prompt.")] = False,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode per prompt and measurement.")] = 32,
    repeats: Annotated[int, typer.Option(help="Measurements per trial; their spread estimates the noise.")] = 2,
    stop: Annotated[str, typer.Option(help="Stop criterion of drafts: adaptive, fixed or threshold.")] = "adaptive",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Result file (default: in the user's data folder, under the model id).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG plot of the search (default: next to the result).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the trials of earlier runs.")] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Find the attention and MLP sub-blocks that the drafter layer_skip should skip (extra: tune).

    An interrupted search continues when the same command runs again.
    """
    if method not in METHODS:
        from specdec_kernels.unknown_names import unknown_name

        raise ValueError(unknown_name("--method", method, METHODS))
    if trials < 1:
        raise ValueError(f"--trials: got {trials}; expected at least 1")
    require("tune", "tune layers", *(("matplotlib",) if method == "similarity" else ()))
    import torch

    from specdec_fast.commands import open_engine
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.targets.skipped_layers import choice_path, write_layers
    from specdec_fast.tune.search_plot import search_chart
    from specdec_fast.tune.skipped_layers_by_similarity import similar_choices
    from specdec_fast.tune.skipped_layers_search import Bench, best_of, confirm, search

    if plot is not None:  # before the slow part
        plot.parent.mkdir(parents=True, exist_ok=True)
    open_engine.quiet()
    setup = open_engine.resolve(
        model=model, draft=None, drafter=open_engine.NO_DRAFTER, rule="replay", draft_tokens=None,
        dtype=dtype, device=device, compile=False,
    )  # fmt: skip
    engine = open_engine.open_engine(setup, threads=threads, max_rows=_PROMPTS)
    target: Any = engine.target
    prompts = [engine.encode(prompt) for prompt in _read(file, lines)]
    place = out or choice_path(target.model_id or model)
    count = target.num_layers
    settings = {"model": model, "dtype": dtype, "device": device, "threads": torch.get_num_threads(), "stop": stop,
                "new_tokens": new_tokens, "prompts": len(prompts), "prompt_ids": _fingerprint(prompts)}  # fmt: skip
    done = [] if fresh else _resumed(place, count, settings)
    if done:
        _say(f"{place}: {counted(len(done), 'trial')} of earlier runs", as_json)
    bench = Bench(
        target, prompts, new_tokens=new_tokens, repeats=repeats, stop=stop, eos_token_ids=engine.eos_token_ids
    )
    found = list(done)

    def keep(trial: Trial, what: str, last: int) -> None:
        found.append(trial)
        best = best_of(found)
        facts = {**settings, "repeats": repeats, "cost": best.cost, "noise": best.noise, "tau": best.tau,
                 "trials": [each.as_json() for each in found]}  # fmt: skip
        write_layers(place, best.skip, count, facts)
        _say(
            f"{what} {len(found)} of {last}: {trial.cost:.3f} of plain decoding's {trial.plain_ms:.2f} ms/token "
            f"(noise {trial.noise:.3f}), tau {trial.tau:.2f}, {len(trial.skip)} of {2 * count} skipped; "
            f"best {best.cost:.3f}",
            as_json,
        )

    def run_search() -> None:
        similar = [each.skip for each in similar_choices(target, [prompt[-512:] for prompt in prompts[:_PROMPTS]])]
        if method == "bayes":
            for trial in search(bench, count, trials, done=done, starts=_starts(similar, count, trials), seed=seed):
                keep(trial, "trial", trials)
        else:
            known = {trial.skip for trial in done}
            selected = [skip for skip in _spread(similar, max(trials - len(done), 0)) if skip not in known]
            _say(f"similarity: {counted(len(similar), 'choice')}, {len(selected)} to be timed (--trials)", as_json)
            for skip in selected:
                keep(bench(skip), "trial", len(done) + len(selected))
        if len(found) > len(done):
            again = confirm(bench, found)
            last = len(found) + len(again)
            for trial in again:
                keep(trial, "again", last)

    try:
        run_search()
    except KeyboardInterrupt:
        again = f"run the same command{' without --fresh' if fresh else ''} again to continue"
        kept = f"; the best of them is in {place}; {again}" if found else ""
        print(f"specdec: interrupted after {counted(len(found), 'trial')}{kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    best = best_of(found)
    picture = plot or place.with_suffix(".png")
    picture.write_bytes(search_chart(found, best, count, f"{model}: sub-blocks that layer_skip skips"))
    noise = [trial.noise for trial in found]
    report = {
        "model": model,
        "file": str(place),
        "plot": str(picture),
        "trials": len(found),
        "attention": list(best.skip.attention),
        "mlp": list(best.skip.mlp),
        "cost": best.cost,
        "noise": max(best.noise, sum(noise) / len(noise)),
        "tau": best.tau,
        "pays": best.cost < 1,
    }
    if as_json:
        print_json(report)
    else:
        print(_summary(report, count))


def _read(file: str | None, lines: bool) -> Sequence[Any]:
    from specdec_fast.commands.prompts import bundled_workload, one_of_each, read_prompts

    if file is not None:
        return read_prompts(None, file, lines)
    return [item.prompt for item in one_of_each(bundled_workload(), _PROMPTS)]


def _fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Returns part of a hash of all token ids."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]


def _resumed(place: Path, num_layers: int, settings: Mapping[str, Any]) -> list[Trial]:
    """Reads trials of earlier runs.

    Args:
        place: Result file, which need not exist.
        num_layers: Layers of the target.
        settings: Settings of this call.

    Returns:
        The trials.

    Raises:
        ValueError: If the file belongs to another model, or if its trials have other settings.
    """
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.targets.skipped_layers import read_choice, read_layers
    from specdec_fast.tune.skipped_layers_search import Trial

    if not place.is_file():
        return []
    read_choice(place, num_layers)
    stored = read_layers(place)
    trials = [Trial.from_json(entry) for entry in stored.get("trials", [])]
    held = counted(len(trials), "trial")
    for name, ours in settings.items():
        if trials and stored.get(name) != ours:
            raise ValueError(
                f"{place}: holds {held} measured with {name} {stored.get(name)!r}; got {ours!r}, and their "
                "costs cannot be compared; start again with --fresh, or write elsewhere with --out"
            )
    return trials


def _spread(choices: Sequence[SkippedLayers], count: int) -> list[SkippedLayers]:
    """Selects at most that many selections, evenly from few to many skipped sub-blocks."""
    if count < 2:
        return list(choices[len(choices) // 2 :][:count])
    last, count = len(choices) - 1, min(count, len(choices))
    return [choices[round(at * last / (count - 1))] for at in range(count)] if count > 1 else list(choices)


def _starts(similar: Sequence[SkippedLayers], num_layers: int, trials: int) -> list[SkippedLayers]:
    """Returns the first selections of the search: none, the middle, and a few by hidden states."""
    from specdec_fast.targets.skipped_layers import SkippedLayers

    return [SkippedLayers(), SkippedLayers.middle(num_layers), *_spread(similar[1:-1], max(trials // 5, 1))]


def _say(line: str, as_json: bool) -> None:
    print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _summary(report: dict[str, Any], num_layers: int) -> str:
    from specdec_fast.commands.terminal_output import counted

    verdict = (
        "use it with `specdec generate --drafter layer_skip`"
        if report["pays"]
        else "no selection was faster than plain decoding here"
    )
    return (
        f"best of {counted(report['trials'], 'trial')}: {report['cost']:.3f} of plain decoding's time per token "
        f"(noise {report['noise']:.3f}), tau {report['tau']:.2f}\n"
        f"skipped of {num_layers} layers: attention {report['attention']}, MLP {report['mlp']}\n"
        f"{report['file']}, {report['plot']}: {verdict}"
    )

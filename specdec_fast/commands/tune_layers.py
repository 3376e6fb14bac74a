"""`specdec tune layers`: selects the sub-blocks that drafter layer_skip skips, by measurement."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json
from specdec_fast.commands.tune_head_layers import head_layers
from specdec_fast.commands.tune_tree import tree
from specdec_fast.core.shell_commands import generate_command
from specdec_fast.extras import require

app = typer.Typer(help="Tune layers, trees and heads of a drafter by measurement.", no_args_is_help=True)
METHODS = ("bayes", "similarity")
_ADVICE = "use --drafter suffix or ngram"
_PROMPTS = 8  # prompts of the bundled workload, and rows for hidden-state similarity


@app.callback()
def main() -> None:
    """Tune layers, trees and heads of a drafter by measurement."""


app.command()(tree)
app.command()(head_layers)


@app.command()
def layers(
    model: options.Model = "demo-target",
    adapter: options.Adapter = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
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
    rounds: Annotated[
        int, typer.Option(help="Measurements of the winner at the end, which decide whether it pays; at least 3.")
    ] = 6,
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

    The winner is measured anew. If its gain is within the noise, the command says so and ends with exit code 1. An
    interrupted search continues when the same command runs again.
    """
    _check_options(method, trials, rounds)
    require("tune", "tune layers", *(("matplotlib",) if method == "similarity" else ()))
    import torch

    from specdec_fast.commands import open_engine
    from specdec_fast.commands.layer_search import LayerSearch, read_trials
    from specdec_fast.targets.skipped_layers import choice_path
    from specdec_fast.tune.skipped_layers_search import Bench

    if plot is not None:  # before the slow part
        plot.parent.mkdir(parents=True, exist_ok=True)
    open_engine.quiet()
    setup = open_engine.resolve(
        model=model, draft=None, drafter="none", rule="replay", draft_tokens=None,
        dtype=dtype, device=device, compile=False, adapter=adapter, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    engine = open_engine.open_engine(setup, threads=threads, max_rows=_PROMPTS)
    target: Any = engine.target
    prompts = [engine.encode(prompt) for prompt in _read(file, lines)]
    place = out or choice_path(target.model_id or model)
    settings = {"model": model, "dtype": dtype, "device": device, "threads": torch.get_num_threads(), "stop": stop,
                "new_tokens": new_tokens, "prompts": len(prompts), "prompt_ids": _fingerprint(prompts),
                "adapter": adapter, "revision": revision}  # fmt: skip
    bench = Bench(
        target, prompts, new_tokens=new_tokens, repeats=repeats, stop=stop, eos_token_ids=engine.eos_token_ids
    )
    done = [] if fresh else read_trials(place, target.num_layers, settings)
    search = LayerSearch(target, bench, place, {**settings, "repeats": repeats}, done, rounds, as_json)
    try:
        verdict = search.run(method, trials, seed, prompts[:_PROMPTS])
    except KeyboardInterrupt:
        print(search.explain_interruption(fresh), file=sys.stderr)
        raise typer.Exit(130) from None
    picture = plot or place.with_suffix(".png")
    search.finish(verdict, picture, f"{model}: sub-blocks that layer_skip skips")
    use = {"--model": model, "--adapter": adapter, "--revision": revision, "--trust-remote-code": trust_remote_code,
           "--dtype": None if dtype == "float32" else dtype, "--device": None if device == "cpu" else device,
           "--threads": threads, "--drafter": "layer_skip"}  # fmt: skip
    command = generate_command(use, {"layers": str(place), **({} if stop == "adaptive" else {"stop": stop})})
    report = search.report(verdict)
    report = {"model": model, "file": str(place), "plot": str(picture), **report}
    report |= {"command": command, "advice": None} if verdict.pays else {"command": None, "advice": _ADVICE}
    if as_json:
        print_json(report)
    else:
        print(_summary(report, target.num_layers, str(verdict.cost)))
    if not verdict.pays:
        raise typer.Exit(1)


def _check_options(method: str, trials: int, rounds: int) -> None:
    """Raises ValueError for options out of range."""
    if method not in METHODS:
        from specdec_kernels.unknown_names import unknown_name

        raise ValueError(unknown_name("--method", method, METHODS))
    if trials < 1:
        raise ValueError(f"--trials: got {trials}; expected at least 1")
    if rounds < 3:
        raise ValueError(f"--rounds: got {rounds}; expected at least 3, for an interval")


def _read(file: str | None, lines: bool) -> Sequence[Any]:
    from specdec_fast.commands.prompts import bundled_workload, one_of_each, read_prompts

    if file is not None:
        return read_prompts(None, file, lines)
    return [item.prompt for item in one_of_each(bundled_workload(), _PROMPTS)]


def _fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Returns part of a hash of all token ids."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]


def _summary(report: dict[str, Any], num_layers: int, cost: str) -> str:
    """Returns the result in words.

    Args:
        report: Fields of the JSON output.
        num_layers: Layers of the target.
        cost: Cost of the winner with its interval.
    """
    from specdec_fast.commands.terminal_output import counted

    measured = counted(report["rounds"], "round")
    skipped = f"skipped of {num_layers} layers: attention {report['attention']}, MLP {report['mlp']}"
    files = f"{report['file']}, {report['plot']}"
    if report["pays"]:
        return (
            f"best of {counted(report['trials'], 'trial')}: {cost} of plain decoding's time per token (95 % interval, "
            f"{measured}), tau {report['tau']:.2f}\n{skipped}\n{files}; use it with\n{report['command']}"
        )
    return (
        f"no set of layers pays on this model: the best of {counted(report['trials'], 'trial')} takes {cost} of plain "
        f"decoding's time per token (95 % interval, {measured}), tau {report['tau']:.2f}; {_ADVICE}\n{skipped}\n{files}"
    )

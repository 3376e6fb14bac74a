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
from specdec_fast.core.shell_commands import generate_command
from specdec_fast.extras import require

if TYPE_CHECKING:
    from specdec_fast.targets.skipped_layers import SkippedLayers
    from specdec_fast.tune.skipped_layers_search import Trial, Verdict

app = typer.Typer(help="Tune layers, trees and heads of a drafter by measurement.", no_args_is_help=True)
METHODS = ("bayes", "similarity")
_FINALISTS = 3
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
    if method not in METHODS:
        from specdec_kernels.unknown_names import unknown_name

        raise ValueError(unknown_name("--method", method, METHODS))
    if trials < 1:
        raise ValueError(f"--trials: got {trials}; expected at least 1")
    if rounds < 3:
        raise ValueError(f"--rounds: got {rounds}; expected at least 3, for an interval")
    require("tune", "tune layers", *(("matplotlib",) if method == "similarity" else ()))
    import torch

    from specdec_fast.commands import open_engine
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.core.confidence import CONFIDENCE
    from specdec_fast.targets.skipped_layers import OWN_FIELDS, choice_path, read_layers, write_layers
    from specdec_fast.tune.search_plot import search_chart
    from specdec_fast.tune.skipped_layers_by_similarity import similar_choices
    from specdec_fast.tune.skipped_layers_search import Bench, best_of, confirm, judge, search
    from specdec_fast.tune.time_left import TrialClock

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
    count = target.num_layers
    settings = {"model": model, "dtype": dtype, "device": device, "threads": torch.get_num_threads(), "stop": stop,
                "new_tokens": new_tokens, "prompts": len(prompts), "prompt_ids": _fingerprint(prompts),
                "adapter": adapter, "revision": revision}  # fmt: skip
    done = [] if fresh else _resumed(place, count, settings)
    if done:
        _say(f"{place}: {counted(len(done), 'trial')} of earlier runs", as_json)
    bench = Bench(
        target, prompts, new_tokens=new_tokens, repeats=repeats, stop=stop, eos_token_ids=engine.eos_token_ids
    )
    found = list(done)
    clock = TrialClock(_FINALISTS + rounds)

    def keep(trial: Trial, what: str, last: int) -> None:
        found.append(trial)
        best = best_of(found)
        facts = {**settings, "repeats": repeats, "cost": best.cost, "noise": best.noise, "tau": best.tau,
                 "trials": [each.as_json() for each in found]}  # fmt: skip
        write_layers(place, best.skip, count, {**facts, "pays": None})  # not judged yet
        _say(
            f"{what} {len(found)} of {last}: {trial.cost:.3f} of plain decoding's {trial.plain_ms:.2f} ms/token "
            f"(noise {trial.noise:.3f}), tau {trial.tau:.2f}, {len(trial.skip)} of {2 * count} skipped; "
            f"best {best.cost:.3f}{clock.after_trial(last - len(found) if what == 'trial' else None)}",
            as_json,
        )

    def run_search() -> Verdict:
        _say(f"{counted(len(prompts), 'prompt')}: comparing hidden states of all layers", as_json)
        ranked = similar_choices(target, [prompt[-512:] for prompt in prompts[:_PROMPTS]])
        similar = [each.skip for each in ranked if each.skip]
        clock.start()
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
            again = confirm(bench, found, _FINALISTS)
            last = len(found) + len(again)
            for trial in again:
                keep(trial, "again", last)
        _say(f"measuring the best anew, at most {rounds} times{clock.of(rounds)}", as_json)
        return judge(bench, best_of(found).skip, rounds)

    try:
        verdict = run_search()
    except KeyboardInterrupt:
        again = f"run the same command{' without --fresh' if fresh else ''} again to continue"
        kept = f"; the best of them is in {place}; {again}" if found else ""
        print(f"specdec: interrupted after {counted(len(found), 'trial')}{kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    best = best_of(found)
    facts = {name: value for name, value in read_layers(place).items() if name not in OWN_FIELDS}
    interval = [verdict.cost.low, verdict.cost.high]
    write_layers(place, verdict.skip, count, {**facts, "pays": verdict.pays, "interval": interval})
    picture = plot or place.with_suffix(".png")
    picture.write_bytes(search_chart(found, best, count, f"{model}: sub-blocks that layer_skip skips"))
    noise = [trial.noise for trial in found]
    use = {"--model": model, "--adapter": adapter, "--revision": revision, "--trust-remote-code": trust_remote_code,
           "--dtype": None if dtype == "float32" else dtype, "--device": None if device == "cpu" else device,
           "--threads": threads, "--drafter": "layer_skip"}  # fmt: skip
    command = generate_command(use, {"layers": str(place), **({} if stop == "adaptive" else {"stop": stop})})
    report = {
        "model": model,
        "file": str(place),
        "plot": str(picture),
        "trials": len(found),
        "attention": list(verdict.skip.attention),
        "mlp": list(verdict.skip.mlp),
        "cost": verdict.cost.mean,
        "interval": interval,
        "confidence": CONFIDENCE,
        "rounds": verdict.rounds,
        "noise": max(best.noise, sum(noise) / len(noise)),
        "tau": verdict.tau,
        "pays": verdict.pays,
        "command": command if verdict.pays else None,
        "advice": None if verdict.pays else _ADVICE,
    }
    if as_json:
        print_json(report)
    else:
        print(_summary(report, count, str(verdict.cost), command))
    if not verdict.pays:
        raise typer.Exit(1)


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
    """Returns the first selections of the search: the middle, and a few by hidden states."""
    from specdec_fast.targets.skipped_layers import SkippedLayers

    return [SkippedLayers.middle(num_layers), *_spread(similar[:-1], max(trials // 5, 1))]


def _say(line: str, as_json: bool) -> None:
    print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _summary(report: dict[str, Any], num_layers: int, cost: str, command: str) -> str:
    """Returns the result in words.

    Args:
        report: Fields of the JSON output.
        num_layers: Layers of the target.
        cost: Cost of the winner with its interval.
        command: Command that uses the winner.
    """
    from specdec_fast.commands.terminal_output import counted

    measured = counted(report["rounds"], "round")
    skipped = f"skipped of {num_layers} layers: attention {report['attention']}, MLP {report['mlp']}"
    files = f"{report['file']}, {report['plot']}"
    if report["pays"]:
        return (
            f"best of {counted(report['trials'], 'trial')}: {cost} of plain decoding's time per token (95 % interval, "
            f"{measured}), tau {report['tau']:.2f}\n{skipped}\n{files}; use it with\n{command}"
        )
    return (
        f"no set of layers pays on this model: the best of {counted(report['trials'], 'trial')} takes {cost} of plain "
        f"decoding's time per token (95 % interval, {measured}), tau {report['tau']:.2f}; {_ADVICE}\n{skipped}\n{files}"
    )

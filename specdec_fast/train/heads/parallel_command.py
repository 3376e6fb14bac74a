"""`specdec train medusa | blockwise`: command lines of parallel heads, and the run that all heads share.

Tests: tests/train/heads/test_parallel_command.py, tests/train/heads/test_parallel_training.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.core.shell_commands import generate_command
from specdec_fast.train.heads.options import TextOptions, TrainingOptions, expand_options
from specdec_fast.train.heads.run_checkpoint import replaced_folder, restore_trainee
from specdec_kernels.unknown_names import unknown_name

_HEADS = "Heads"


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Held-out tokens, int32 [N], and the special tokens with which every block of them begins."""

    tokens: Any
    beginning: list[int]


@dataclass(frozen=True, slots=True)
class ParallelHeadOptions:
    """Options of heads that predict several positions from one hidden state."""

    heads: Annotated[int, typer.Option(help="Number of heads: positions to predict ahead.", rich_help_panel=_HEADS)] = 4
    labels: Annotated[
        str,
        typer.Option(
            help="Training labels. text: tokens of the text; target: the target's distribution.", rich_help_panel=_HEADS
        ),
    ] = "text"


@expand_options(out=Path("medusa-heads"))
def medusa(
    text: TextOptions,
    ahead: ParallelHeadOptions,
    *,
    layers: Annotated[int, typer.Option(help="Residual blocks per head.", rich_help_panel=_HEADS)] = 1,
    own_lm_head: Annotated[
        bool,
        typer.Option(
            "--own-lm-head/--tied",
            help="Give every head its own LM head, or share the target's.",
            rich_help_panel=_HEADS,
        ),
    ] = True,
    layout: Annotated[
        str, typer.Option(help="Layout of the saved weights: fasterdecoding or vllm.", rich_help_panel=_HEADS)
    ] = "fasterdecoding",
    nodes: Annotated[
        int, typer.Option(help="Number of nodes of the tree that is built for the heads.", rich_help_panel=_HEADS)
    ] = 63,
    training: TrainingOptions,
) -> None:
    """Train Medusa heads for a frozen model (Medusa-1). Use them with `--drafter medusa -o head=OUT/head`.

    For several GPUs or machines, run `accelerate launch -m specdec_fast.cli train medusa ...`.
    """
    from specdec_fast.heads.checkpoint_medusa import LAYOUTS, save_medusa
    from specdec_fast.heads.medusa import MedusaHeads
    from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE, ParallelHeadsTrainee, measure_rank_rates
    from specdec_fast.train.heads.target_states import TargetStates
    from specdec_fast.trees.static_shape import best_shape, expected_tokens, write_shape

    if layout not in LAYOUTS:
        raise ValueError(unknown_name("--layout", layout, LAYOUTS))
    if nodes < 1:
        raise ValueError(f"--nodes: got {nodes}; expected at least 1")

    def build(target: Any, _row: Any) -> ParallelHeadsTrainee:
        projection = target.get_output_embeddings().weight
        made = MedusaHeads(target.config.get_text_config().hidden_size, len(projection), ahead.heads,
                           num_layers=layers, own_lm_head=own_lm_head)  # fmt: skip
        made.start_from(projection.float())
        return ParallelHeadsTrainee(made, TargetStates(target, (AUX_HIDDEN_STATE,)), 0.8, ahead.labels)

    def save(trainee: ParallelHeadsTrainee, held: HeldOutText, place: Path, facts: dict[str, Any]) -> None:
        projection = trainee.states.model.get_output_embeddings().weight
        save_medusa(trainee.heads, place, base_model=text.model, layout=layout, lm_head=projection, facts=facts)
        rates = measure_rank_rates(trainee, held.tokens, training.length, beginning=held.beginning)
        if rates[0][0] > 0:  # otherwise the drafter uses a published tree
            shape = best_shape(rates, nodes)
            write_shape(place / "tree.json", shape, {"expected_tokens": expected_tokens(shape, rates), "rates": rates})

    train_heads("medusa", text, training, build, save, {"labels": ahead.labels}, final_measurements=1)


@expand_options(out=Path("blockwise-heads"))
def blockwise(
    text: TextOptions,
    ahead: ParallelHeadOptions,
    *,
    inner: Annotated[
        int | None,
        typer.Option(help="Width of the layer per position (default: the target's).", rich_help_panel=_HEADS),
    ] = None,
    training: TrainingOptions,
) -> None:
    """Train the heads of blockwise parallel decoding for a frozen model."""
    from specdec_fast.heads.blockwise import BlockwiseHeads
    from specdec_fast.heads.checkpoint_blockwise import save_blockwise
    from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE, ParallelHeadsTrainee
    from specdec_fast.train.heads.target_states import TargetStates

    def build(target: Any, _row: Any) -> ParallelHeadsTrainee:
        rows = len(target.get_output_embeddings().weight)
        made = BlockwiseHeads(target.config.get_text_config().hidden_size, rows, ahead.heads, inner)
        return ParallelHeadsTrainee(made, TargetStates(target, (AUX_HIDDEN_STATE,)), 1.0, ahead.labels)

    def save(trainee: Any, held: HeldOutText, place: Path, facts: dict[str, Any]) -> None:
        save_blockwise(trainee.heads, place, base_model=text.model, facts=facts)

    train_heads("blockwise", text, training, build, save, {"labels": ahead.labels})


def read_training_tokens(
    text: TextOptions, target: Any, tokenizer: Any, seed: int, folder: Path, rank: int, size: int
) -> Any:
    """Reads the training tokens of a command line; every process gets the same ones.

    Args:
        text: Model, inputs and answers.
        target: The target model, which answers prompts.
        tokenizer: The target's tokenizer.
        seed: Seed of the first answer.
        folder: Folder of the stored answers.
        rank: Index of this process, which generates its share of the answers.
        size: Number of processes.

    Returns:
        Tokens, int32 [N]; ~token marks one without loss.

    Raises:
        ValueError: If there is no text.
    """
    from specdec_fast.loading import BUNDLED
    from specdec_fast.retrieval.documents import find_files, read_documents
    from specdec_fast.train.heads.target_answers import generate_answers, load_answers
    from specdec_fast.train.heads.time_left import format_seconds
    from specdec_fast.train.heads.training_texts import read_corpus_tokens, read_token_row

    if not text.inputs:
        if text.model not in BUNDLED:
            raise ValueError(f"training text: got none for {text.model!r}; expected files or folders of text")
        return read_corpus_tokens(tokenizer)
    if text.answer:
        prompts = list(read_documents(find_files(text.inputs), text.field))

        if not text.chat and getattr(tokenizer, "chat_template", None) and rank == 0:
            note = "the model has a chat template; --chat applies it to prompts that lack it"
            print(f"specdec: note: {note}", file=sys.stderr)

        def report(count: int, left: float) -> None:
            if rank == 0:
                asked, ends = min(count * size, len(prompts)), format_seconds(left)
                words = f"answers: {asked:,} of {len(prompts):,} prompts" + (f", {ends}" if ends else "")
                print(words, file=sys.stderr, flush=True)

        how: dict[str, Any] = {"new_tokens": text.answer, "temperature": text.temperature, "seed": seed}
        how["chat"] = text.chat
        return load_answers(
            generate_answers(target, tokenizer, prompts, folder, **how, rank=rank, size=size, report=report)
        )
    return read_token_row(text.inputs, text.field, tokenizer)


def check_shared_folder(accelerator: Any, folder: Path) -> None:
    """Checks that all processes see the same work folder.

    Otherwise they would wait forever for each other's answers, and only some would continue from a checkpoint.

    Raises:
        ValueError: In all processes, if one of them does not see the folder.
    """
    import time

    import torch

    if accelerator.num_processes == 1:
        return
    own = time.time_ns() % 2**31 if accelerator.is_main_process else 0
    stamp = int(
        accelerator.reduce(torch.tensor([own], device=accelerator.device))
    )  # a name that no process has looked up
    mark = folder / f"seen-{stamp}"
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    accelerator.wait_for_everyone()
    seen = int(accelerator.reduce(torch.tensor([int(mark.exists())], device=accelerator.device)))
    if accelerator.is_main_process:
        mark.unlink()
    if seen < accelerator.num_processes:
        raise ValueError(
            f"--out: {seen} of {accelerator.num_processes} processes see the folder {folder} of the first one; "
            "expected all of them to; give a folder that every machine has under this name"
        )


def train_heads(
    kind: str,
    text: TextOptions,
    training: TrainingOptions,
    build: Callable[[Any, Any], Any],
    save: Callable[[Any, HeldOutText, Path, dict[str, Any]], None],
    facts: dict[str, Any],
    final_measurements: int = 0,
    **settings: Any,
) -> None:
    """Trains heads and writes weights, curve and measurements.

    An interruption or an error leaves the head of the last checkpoint in the work folder. The tokens are read once and
    stored there too, under a name made from their sources.

    Args:
        kind: Name of the drafter.
        text: Model, inputs and work folder.
        training: Hyperparameters.
        build: Maps (target, training tokens [N]) to a trainee with an attribute `states`.
        save: Writes (trainee, held-out text, folder, facts).
        facts: Facts about the training for config.json, besides the measurements.
        final_measurements: Passes over the held-out text that `save` makes.
        settings: Further fields of `Settings`.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once a checkpoint is written.
        ValueError: If options contradict each other or an earlier run, or if the model has no tokenizer.
    """
    from specdec_fast.extras import require

    require("train", f"train {kind}")
    from specdec_fast.loading.quiet_libraries import quiet_libraries

    quiet_libraries()
    from functools import partial
    from shutil import rmtree
    from zlib import crc32

    import numpy as np
    import torch

    from specdec_fast.engine.prompts import added_beginning
    from specdec_fast.loading import ModelOptions, load_model, load_tokenizer
    from specdec_fast.train.heads.memory_estimate import memory_note
    from specdec_fast.train.heads.progress_bar import ProgressBar
    from specdec_fast.train.heads.run_checkpoint import check_same_run, read_stored_step, with_process_count
    from specdec_fast.train.heads.settings import Progress, Settings
    from specdec_fast.train.heads.trainer import create_accelerator, fit
    from specdec_fast.train.heads.training_curve import write_history
    from specdec_fast.train.heads.training_texts import split

    options = asdict(training)
    dtype, threads, model, out = options.pop("dtype"), options.pop("threads"), text.model, text.out
    made = Settings(**options, **settings)
    text.check()
    from_hub = ModelOptions(text.revision, text.trust_remote_code, adapter=text.adapter)
    tokenizer = load_tokenizer(model, from_hub)
    if tokenizer is None:
        raise ValueError(f"--model: got {model!r}; expected a model with a tokenizer")
    beginning = added_beginning(tokenizer)
    source: dict[str, Any] = {
        "inputs": [str(each.resolve()) for each in text.inputs or ()],
        "field": text.field,
        "model": model,
    }
    source["answer"] = text.answer
    named = {"beginning": beginning, "adapter": text.adapter, "revision": text.revision, "chat": text.chat}
    source |= {name: value for name, value in named.items() if value}
    if text.answer:  # answers depend on the dtype too; format 2 marks tokens without loss
        source |= {"temperature": text.temperature, "seed": made.seed, "dtype": dtype, "format": 2}
    run = {"kind": kind, "dtype": dtype, **facts, **source}
    here = create_accelerator(made)
    check_same_run(out, made, with_process_count(run, here))  # before answers are generated, which may take hours
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(made.seed)
    check_shared_folder(here, out)
    target = load_model(model, dtype, here.device, options=from_hub)
    name = f"{crc32(json.dumps(source).encode()):08x}"
    place, answers = out / f"tokens-{name}.npy", out / f"answers-{name}"
    if not place.exists():
        row = read_training_tokens(text, target, tokenizer, made.seed, answers, here.process_index, here.num_processes)
        out.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(f".{here.process_index}.npy")  # every process writes the same content
        np.save(unfinished, row)
        unfinished.replace(place)
    here.wait_for_everyone()
    if here.is_main_process:
        rmtree(answers, ignore_errors=True)
    row, held = split(np.load(place), made.length)
    trainee = build(target, row)
    if (note := memory_note(trainee, made, here.device)) and here.is_main_process:
        print(f"specdec: note: {note}", file=sys.stderr)
    title = f"{kind} heads for {model}"
    if (stored := read_stored_step(out)) and here.is_main_process:
        print(f"{out / 'checkpoint'}: continues after step {stored} of {made.steps}", file=sys.stderr)
    progress = Progress()
    use = {
        "--model": model, "--adapter": text.adapter, "--revision": text.revision,
        "--trust-remote-code": text.trust_remote_code, "--chat": text.chat,
        "--dtype": None if dtype == "float32" else dtype, "--drafter": kind,
    }  # fmt: skip
    command = generate_command(use, {"head": str(out / "head")})

    def write_head(step: int) -> None:
        last = [each for each in progress.history if each["step"] <= step][-1]
        with replaced_folder(out / "head") as folder:
            save(trainee, HeldOutText(held, beginning), folder, {"training": {"steps": step, **facts, **last}})

    with ProgressBar(f"{kind}, {len(row):,} tokens") as bar:
        try:
            fit(
                trainee, trainee.states, row, held, made, out, bar, facts=run, beginning=beginning, progress=progress,
                measuring=bar.measuring, measured=partial(write_history, folder=out, title=title),
                final_measurements=final_measurements,
            )  # fmt: skip
        except BaseException as error:
            if here.is_main_process:
                print(_keep_head(trainee, out, made.steps, write_head, command, error), file=sys.stderr)
            raise
    if not here.is_main_process:  # the main process writes the result
        return
    write_head(progress.step)
    first, last = progress.history[0]["tokens_per_step"], progress.history[-1]["tokens_per_step"]
    print(f"{out / 'head'}: a chain yields {last:.2f} tokens per step on held-out text, {first:.2f} before training")
    print(command)


def _keep_head(
    trainee: Any, out: Path, steps: int, write_head: Callable[[int], None], command: str, error: BaseException
) -> str:
    """Writes the head of the last checkpoint after an interruption or an error.

    Args:
        trainee: The trainee, which gets the checkpoint's weights.
        out: Work folder.
        steps: Steps of the whole run.
        write_head: Writes the head, given the number of finished steps.
        command: Command that uses the head.
        error: What ended the training.

    Returns:
        A message: what there is, and how to continue.
    """
    what = "interrupted" if isinstance(error, KeyboardInterrupt) else "training failed"
    step = restore_trainee(out, trainee)
    if not step:
        return f"specdec: {what} before the first checkpoint; there is no head yet"
    try:
        write_head(step)
    except Exception as failure:
        kept = f"the head could not be written: {failure}"
    else:
        kept = f"{out / 'head'} is the head so far; use it with\n  {command}"
    return f"specdec: {what} after step {step} of {steps}; run the same command again to continue; {kept}"

"""Trains the bundled demo pair from text on this machine, in stages that can be interrupted.

The stages are tokenizer, target, unlikelihood, draft, export and measure. All state is in one work folder. A finished
stage is skipped, and an interrupted one continues from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.train.demo_pair.corpus import Document, held_out, read_corpus
from specdec_fast.train.demo_pair.recipe import Recipe
from specdec_fast.train.demo_pair.tokenizer import encode, train_tokenizer
from specdec_fast.train.demo_pair.training_loop import Progress, Report
from specdec_fast.train.token_batches import Tokens, arrange

if TYPE_CHECKING:
    from specdec_fast.train.demo_pair.worker_processes import Stage

STAGES = ("tokenizer", "target", "unlikelihood", "draft", "export", "measure")
_HOW = ("workers", "compiled", "save_every")  # fields of a recipe that may differ between calls


class Unfinished(RuntimeError):
    """Raised if a stage stopped before its budget was used up. Another run with the same work folder continues it."""


def refuse_another_recipe(recipe: Recipe, out: Path) -> None:
    """Writes recipe.json into a new work folder; raises ValueError for the folder of another recipe."""
    place = out / "recipe.json"
    ours = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in _HOW}
    ours = json.loads(json.dumps(ours))
    if place.is_file():
        theirs = json.loads(place.read_text(encoding="utf-8"))
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{out}: was begun with {name} {theirs.get(name)}; got {value}; give the options of the first "
                    "call, or another --out"
                )
        return
    out.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
    partial.replace(place)


def make_tokens(recipe: Recipe, out: Path, documents: list[Document] | None = None) -> None:
    """Trains the tokenizer on the training documents, and encodes the corpus: tokenizer/, tokens.npz."""
    if (out / "tokens.npz").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    documents = read_corpus() if documents is None else documents
    tokenizer = train_tokenizer(
        (d.text for d in documents if not held_out(d)), recipe.target.vocabulary, recipe.target.context
    )
    tokenizer.save_pretrained(out / "tokenizer")
    partial = out / "tokens.partial.npz"
    arrange(documents, encode(tokenizer, documents), recipe.seed).save(partial)
    partial.replace(out / "tokens.npz")


def run(
    recipe: Recipe,
    out: Path,
    report: Report,
    documents: list[Document] | None = None,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs every stage that is not finished.

    Args:
        recipe: The recipe.
        out: Work folder.
        report: Called after every training step.
        documents: Documents that replace the corpus of this machine.
        stop_after: Ends every training stage after that many steps.
        say: Prints a line.

    Returns:
        The measured numbers.

    Raises:
        Unfinished: If a stage was stopped.
        ValueError: If the folder belongs to another recipe, or if a part of the corpus is missing.
    """
    from specdec_fast.train.demo_pair.draft_stage import train_draft
    from specdec_fast.train.demo_pair.export import export_pair, measure_pair
    from specdec_fast.train.demo_pair.target_stage import train_target, train_unlikelihood

    refuse_another_recipe(recipe, out)
    say("tokenizer: byte-level BPE over the training documents")
    make_tokens(recipe, out, documents)
    say(f"corpus: {len(Tokens.load(out / 'tokens.npz').train):,} training tokens")
    stages = {"target": train_target, "unlikelihood": train_unlikelihood, "draft": train_draft}
    train_stages(stages, recipe, out, report, stop_after, say)
    export_pair(recipe, out)
    return measure_pair(recipe, out, say=say)


def train_stages(
    stages: Mapping[str, Stage],
    recipe: Recipe,
    out: Path,
    report: Report,
    stop_after: int | None,
    say: Callable[[str], None],
) -> None:
    """Trains the stages one after another, each in all training processes.

    Raises:
        Unfinished: If a stage was stopped.
    """
    from specdec_fast.train.demo_pair.worker_processes import together

    for name, stage in stages.items():
        begun = time.monotonic()
        progress: Progress = together(stage, recipe, out, report, stop_after, recipe.workers)
        if not progress.done:
            raise Unfinished(f"stage {name} stopped at step {progress.step}; run again with --out {out} to continue")
        say(
            f"{name}: {progress.tokens:,} tokens in {progress.seconds:.0f} s "
            f"(this call {time.monotonic() - begun:.0f} s), loss {progress.loss:.4f}"
        )


def install(out: Path, assets: Path) -> None:
    """Replaces the bundled pair by an exported and measured one."""
    for name in ("demo-target", "demo-draft"):
        fresh = assets / f".{name}.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(out / "export" / name, fresh)
        shutil.rmtree(assets / name, ignore_errors=True)
        fresh.rename(assets / name)
    for name in ("demo-pair.json", "demo-pair.md"):
        shutil.copyfile(out / "export" / name, assets / name)

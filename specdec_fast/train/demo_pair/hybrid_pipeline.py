"""Trains the bundled hybrid target from the bundled Llama target, in stages that can be interrupted.

The stages are tokens, mixers, hybrid, export and measure. All state is in one work folder. A finished stage is skipped,
and an interrupted one continues from its checkpoint. Tests: tests/train/demo_pair/test_hybrid_pipeline.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec_fast.train.demo_pair.corpus import Document, read_corpus
from specdec_fast.train.demo_pair.pipeline import refuse_another_recipe, train_stages
from specdec_fast.train.demo_pair.recipe import HybridRecipe
from specdec_fast.train.demo_pair.tokenizer import encode, load_tokenizer
from specdec_fast.train.demo_pair.training_loop import Report
from specdec_fast.train.token_batches import Tokens, arrange

ASSETS = Path(__file__).parents[2] / "assets"
PAIR = ("demo-target", "demo-draft")


def take_pair(pair: Path, out: Path) -> None:
    """Copies the folders demo-target and demo-draft of `pair` into the work folder, unless they are there.

    Raises:
        ValueError: If another target is there.
    """
    found = [each / PAIR[0] / "model.safetensors" for each in (out, pair)]
    if found[0].exists() and found[0].read_bytes() != found[1].read_bytes():
        raise ValueError(f"{out}: was begun from another target than that of {pair}; run again with another --out")
    for name in PAIR:
        if not (out / name).exists():
            partial = out / f".{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(pair / name, partial)
            partial.rename(out / name)


def encode_corpus(recipe: HybridRecipe, out: Path, documents: list[Document] | None = None) -> None:
    """Encodes the corpus with the tokenizer of the pair: tokens.npz."""
    if (out / "tokens.npz").exists():
        return
    documents = read_corpus() if documents is None else documents
    partial = out / "tokens.partial.npz"
    arrange(documents, encode(load_tokenizer(out / PAIR[0]), documents), recipe.seed).save(partial)
    partial.replace(out / "tokens.npz")


def run_hybrid(
    recipe: HybridRecipe,
    out: Path,
    report: Report,
    pair: Path = ASSETS,
    documents: list[Document] | None = None,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Runs every stage that is not finished.

    Args:
        recipe: The recipe. Its `target` has the sizes of the pair's target.
        out: Work folder.
        report: Called after every training step.
        pair: Folder with demo-target, which is converted, and demo-draft, which is kept.
        documents: Documents that replace the corpus of this machine.
        stop_after: Ends every training stage after that many steps.
        say: Prints a line.

    Returns:
        The measured numbers.

    Raises:
        Unfinished: If a stage was stopped.
        ValueError: If the folder belongs to another recipe, or if a part of the corpus is missing.
    """
    from specdec_fast.train.demo_pair.hybrid_measure import export_hybrid, measure_hybrid
    from specdec_fast.train.demo_pair.hybrid_stage import train_hybrid, train_mixers

    refuse_another_recipe(recipe, out)
    take_pair(pair, out)
    encode_corpus(recipe, out, documents)
    say(f"corpus: {len(Tokens.load(out / 'tokens.npz').train):,} training tokens")
    stages = {"mixers": train_mixers, "hybrid": train_hybrid}
    train_stages(stages, recipe, out, report, stop_after, say)
    export_hybrid(recipe, out)
    return measure_hybrid(recipe, out, say=say)


def install_hybrid(out: Path, assets: Path) -> None:
    """Replaces the bundled hybrid target by an exported and measured one.

    Raises:
        ValueError: If it was made from another target than the bundled one.
    """
    made_from = json.loads((out / "export" / "demo-hybrid.json").read_text(encoding="utf-8"))["made_from"]
    bundled = json.loads((assets / "demo-pair.json").read_text(encoding="utf-8"))["target"]["sha256"]
    if made_from != bundled:
        raise ValueError(
            f"{out}: was made from a target with sha256 {made_from}; expected that of {assets}, {bundled}; "
            "run again with another --out"
        )
    fresh = assets / ".demo-hybrid.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(out / "export" / "demo-hybrid", fresh)
    shutil.rmtree(assets / "demo-hybrid", ignore_errors=True)
    fresh.rename(assets / "demo-hybrid")
    for name in ("demo-hybrid.json", "demo-hybrid.md"):
        shutil.copyfile(out / "export" / name, assets / name)

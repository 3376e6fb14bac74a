"""Stages 4 and 5 of the hybrid target: writes and measures bfloat16 weights, and writes the model card.

Tests: tests/train/demo_pair/test_hybrid_pipeline.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.train.demo_pair.export import (
    WORKLOAD,
    continuations,
    load_exported,
    model_facts,
    rounded,
    save_model,
    training_facts,
    workload_texts,
)
from specdec_fast.train.demo_pair.hybrid_card import card
from specdec_fast.train.demo_pair.measure import acceptance, bits_per_byte, windows
from specdec_fast.train.demo_pair.model_shapes import build_hybrid
from specdec_fast.train.demo_pair.recipe import HybridRecipe
from specdec_fast.train.demo_pair.target_stage import load_model
from specdec_fast.train.demo_pair.tokenizer import load_tokenizer
from specdec_fast.train.token_batches import Tokens


def export_hybrid(recipe: HybridRecipe, out: Path) -> None:
    """Exports the checkpoint hybrid.pt to export/demo-hybrid."""
    model = load_model(build_hybrid(recipe.target, recipe.seed), out / "hybrid.pt")
    save_model(model, out / "demo-target", out / "export" / "demo-hybrid")


def measure_hybrid(recipe: HybridRecipe, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures the exported hybrid target with the draft and with the Llama that it was made from.

    Writes demo-hybrid.json, demo-hybrid.md and texts.json. The card includes the file notes.md of the work folder, if
    there is one.

    Args:
        recipe: The recipe.
        out: Work folder.
        say: Prints a line.

    Returns:
        The numbers of demo-hybrid.json.
    """
    export = out / "export"
    documents = Tokens.load(out / "tokens.npz").held_documents()
    hybrid, llama, draft = (load_exported(each) for each in (export / "demo-hybrid", *_pair(out)))
    tokenizer = load_tokenizer(export / "demo-hybrid")
    prompts = json.loads(WORKLOAD.read_text(encoding="utf-8")) if WORKLOAD.exists() else []
    length, prefix = min(1024, recipe.target.context), 64
    pieces = list(windows(documents, length, recipe.measured_tokens))
    say("measuring bits per byte and alpha on held-out documents")
    with_draft, with_llama = acceptance(hybrid, draft, pieces), acceptance(llama, hybrid, pieces)
    numbers: dict[str, Any] = {
        "target": {**model_facts(hybrid, export / "demo-hybrid"), "layer_types": hybrid.config.layer_types},
        "made_from": hashlib.sha256((out / "demo-target" / "model.safetensors").read_bytes()).hexdigest(),
        "bits_per_byte": {
            "hybrid": bits_per_byte(with_draft, documents, "target"),
            "llama": bits_per_byte(with_llama, documents, "target"),
            "draft": bits_per_byte(with_draft, documents, "draft"),
        },
        "alpha_held_out": with_draft,
        "llama_held_out": with_llama,
    }
    say("measuring alpha on text that the hybrid target generates")
    for temperature, name in ((1.0, "alpha_sampled_contexts"), (0.0, "alpha_greedy_contexts")):
        texts = continuations(
            hybrid, documents, temperature, recipe.continued_rows, prefix, recipe.continued_tokens, recipe.seed
        )
        numbers[name] = acceptance(hybrid, draft, texts, skip=prefix)["all"]
    written = {
        name: workload_texts(hybrid, tokenizer, prompts, temperature, recipe.workload_tokens)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    numbers["workload"] = {
        name: {
            "distinct_4_mean": float(np.mean([row["distinct_4"] for row in rows])) if rows else 1.0,
            "loops": [row["id"] for row in rows if row["loop"]],
        }
        for name, rows in written.items()
    }
    numbers["training"] = training_facts(out, ("mixers", "hybrid"))
    found: dict[str, Any] = rounded(numbers)
    (export / "demo-hybrid.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "texts.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    notes = out / "notes.md"
    words = notes.read_text(encoding="utf-8") if notes.exists() else ""
    (export / "demo-hybrid.md").write_text(card(recipe, found, words), encoding="utf-8")
    return found


def _pair(out: Path) -> tuple[Path, Path]:
    """The folders of the Llama and of the draft."""
    return out / "demo-target", out / "demo-draft"

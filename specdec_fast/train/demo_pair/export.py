"""Stages 5 and 6 of the demo pair: writes and measures bfloat16 weights, and writes the model card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.train.demo_pair.measure import (
    HeldDocument,
    acceptance,
    bits_per_byte,
    continue_text,
    distinct,
    loop_length,
    windows,
)
from specdec_fast.train.demo_pair.model_card import write_card
from specdec_fast.train.demo_pair.model_shapes import build
from specdec_fast.train.demo_pair.recipe import Recipe
from specdec_fast.train.demo_pair.target_stage import load_model
from specdec_fast.train.demo_pair.tokenizer import load_tokenizer
from specdec_fast.train.token_batches import Tokens

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WORKLOAD = Path(__file__).parents[2] / "assets" / "workload.json"


def save_model(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Writes bfloat16 weights, configuration and tokenizer to a folder that AutoModelForCausalLM can load."""
    from transformers import GenerationConfig

    end = model.config.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model = model.bfloat16()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, safe_serialization=True)
    load_tokenizer(tokenizer_folder).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # all versions of transformers have it
    settings = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)


def export_pair(recipe: Recipe, out: Path) -> None:
    """Exports the checkpoints final.pt and draft.pt to export/demo-target and export/demo-draft."""
    for name, shape, checkpoint in (
        ("demo-target", recipe.target, "final.pt"),
        ("demo-draft", recipe.draft, "draft.pt"),
    ):
        model = load_model(build(shape, recipe.seed), out / checkpoint)
        save_model(model, out / "tokenizer", out / "export" / name)


def load_exported(folder: Path) -> LlamaForCausalLM:
    """Loads exported bfloat16 weights as a float32 model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def continuations(
    model: LlamaForCausalLM,
    documents: Sequence[HeldDocument],
    temperature: float,
    rows: int,
    prefix: int,
    count: int,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yields held-out beginnings that the model continues, as (kind, tokens)."""
    pieces = [piece for _, piece in windows(documents, prefix - 1) if piece.shape[1] == prefix]
    order = np.random.default_rng(seed).permutation(len(pieces))[:rows]
    batch = torch.cat([pieces[i] for i in order])
    written = continue_text(model, batch, count, temperature, torch.Generator().manual_seed(seed))
    yield ("greedy" if temperature == 0.0 else "sampled"), written


def workload_texts(
    model: LlamaForCausalLM,
    tokenizer: Any,
    prompts: Sequence[dict[str, str]],
    temperature: float,
    count: int = 200,
) -> list[dict[str, Any]]:
    """Continues each prompt by `count` tokens.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Prompts of the workload.
        temperature: Sampling temperature.
        count: New tokens of each prompt.

    Returns:
        For each prompt its distinct-4, loop length, tokens before the end, and text.
    """
    if not prompts:
        return []
    ids = [tokenizer(prompt["prompt"])["input_ids"] for prompt in prompts]
    longest = max(map(len, ids))
    prefix = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    written = continue_text(model, prefix, count, temperature, torch.Generator().manual_seed(0), mask)
    rows = []
    for prompt, new in zip(prompts, written[:, longest:].tolist(), strict=True):
        end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else count
        rows.append(
            {
                "id": prompt["id"],
                "kind": prompt["kind"],
                "distinct_4": round(distinct(new[:end]), 4),
                "loop": loop_length(new[:end]),
                "tokens_before_end": end,
                "text": tokenizer.decode(new[:end]),
            }
        )
    return rows


def rounded(value: Any) -> Any:
    """Returns a value for JSON, whose numbers have four decimals; NaN becomes None."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return None if value != value else round(value, 4)  # JSON has no NaN
    return value


def measure_pair(recipe: Recipe, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures the exported pair, and writes demo-pair.json, demo-pair.md and texts.json.

    The card includes the file notes.md of the work folder, if there is one.

    Args:
        recipe: The recipe of the pair.
        out: Work folder.
        say: Prints a line.

    Returns:
        The numbers of demo-pair.json.
    """
    export = out / "export"
    documents = Tokens.load(out / "tokens.npz").held_documents()
    target, draft = load_exported(export / "demo-target"), load_exported(export / "demo-draft")
    tokenizer = load_tokenizer(export / "demo-target")
    prompts = json.loads(WORKLOAD.read_text(encoding="utf-8")) if WORKLOAD.exists() else []
    length, prefix = min(1024, recipe.target.context), 64
    say("measuring bits per byte and alpha on held-out documents")
    rows = acceptance(target, draft, windows(documents, length, recipe.measured_tokens))
    numbers: dict[str, Any] = {
        "target": model_facts(target, export / "demo-target"),
        "draft": model_facts(draft, export / "demo-draft"),
        "bits_per_byte": {who: bits_per_byte(rows, documents, who) for who in ("target", "draft")},
        "alpha_held_out": rows,
    }
    say("measuring alpha on text that the target generates")
    for temperature, name in ((1.0, "alpha_sampled_contexts"), (0.0, "alpha_greedy_contexts")):
        pieces = continuations(
            target,
            documents,
            temperature,
            recipe.continued_rows,
            prefix,
            recipe.continued_tokens,
            recipe.seed,
        )
        numbers[name] = acceptance(target, draft, pieces, skip=prefix)["all"]
    texts = {
        name: workload_texts(target, tokenizer, prompts, temperature, recipe.workload_tokens)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    numbers["workload"] = {
        name: {
            "distinct_4_mean": float(np.mean([r["distinct_4"] for r in lines])) if lines else 1.0,
            "distinct_4": {r["id"]: r["distinct_4"] for r in lines},
            "loops": [r["id"] for r in lines if r["loop"]],
            "ended_early": [r["id"] for r in lines if r["tokens_before_end"] < recipe.workload_tokens],
        }
        for name, lines in texts.items()
    }
    numbers["training"] = training_facts(out, ("target-start", "target", "final", "draft"))
    numbers = rounded(numbers)
    (export / "demo-pair.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    (out / "texts.json").write_text(json.dumps(texts, indent=1), encoding="utf-8")
    notes = out / "notes.md"
    write_card(recipe, numbers, export / "demo-pair.md", notes.read_text(encoding="utf-8") if notes.exists() else "")
    return numbers


def model_facts(model: LlamaForCausalLM, folder: Path) -> dict[str, Any]:
    """Returns the parameters and layers of an exported model, and the bytes and sha256 of its weights."""
    weights = folder / "model.safetensors"
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def training_facts(out: Path, stages: Sequence[str]) -> dict[str, Any]:
    """Returns steps, tokens, seconds and loss of stages, from their checkpoints."""
    facts = {}
    for name in stages:
        stored = torch.load(out / f"{name}.pt", map_location="cpu", weights_only=True)["progress"]
        facts[name] = {key: stored[key] for key in ("step", "tokens", "seconds", "loss")}
    return facts

"""The model card of the demo pair, written from the measured numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_fast.train.demo_pair.recipe import Recipe

NATURAL = "0.83 (code) to 0.94 (King James Bible)"  # distinct-4 of the corpus


def write_card(recipe: Recipe, numbers: dict[str, Any], path: Path, notes: str = "") -> None:
    """Writes the card to `path`: data, licences, recipe with notes on the run, numbers, limits."""
    path.write_text(card(recipe, numbers, notes), encoding="utf-8")


def _shape(numbers: dict[str, Any], name: str, recipe: Recipe) -> str:
    shape = recipe.target if name == "target" else recipe.draft
    facts = numbers[name]
    return (
        f"| {name} | {facts['parameters']:,} | {shape.layers} | {shape.hidden} "
        f"| {shape.heads} / {shape.kv_heads} | {shape.inner} | {facts['bytes'] / 1e6:.1f} MB |"
    )


def _domains(rows: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"| held-out, {kind} | {row['alpha']:.3f} | {row['greedy_agreement']:.3f} "
        f"| {row['p_of_draft_argmax']:.3f} | {row['positions']:,} |"
        for kind, row in rows.items()
    )


def card(recipe: Recipe, numbers: dict[str, Any], notes: str = "") -> str:
    """Returns the card as Markdown."""
    bits, work, training = numbers["bits_per_byte"], numbers["workload"], numbers["training"]
    contexts = "\n".join(
        f"| {label} | {numbers[key]['alpha']:.3f} | {numbers[key]['greedy_agreement']:.3f} "
        f"| {numbers[key]['p_of_draft_argmax']:.3f} | {numbers[key]['positions']:,} |"
        for label, key in (
            ("text sampled from the target, T = 1", "alpha_sampled_contexts"),
            ("greedy text of the target", "alpha_greedy_contexts"),
        )
    )
    per_prompt = "\n".join(
        f"| {name} | {value:.3f} | {work['sampled']['distinct_4'][name]:.3f} |"
        for name, value in work["greedy"]["distinct_4"].items()
    )
    stages = "\n".join(
        f"| {name} | {row['step']:,} | {row['tokens']:,} | {row['seconds']:.0f} |" for name, row in training.items()
    )
    held_bits = "\n".join(
        f"| {kind} | {bits['target'][kind]:.3f} | {bits['draft'][kind]:.3f} |" for kind in bits["target"]
    )
    looping = work["greedy"]["loops"]
    loops = (
        f"Greedy text ends in a loop after {len(looping)} prompts ({', '.join(looping)})."
        if looping
        else "After no prompt of the workload does greedy text end in a loop (a period that repeats to the end)."
    )
    notes = f"\n{notes.strip()}\n" if notes.strip() else ""
    arithmetic = "bfloat16 matrix products and float32 weights" if recipe.bfloat16 else "float32"
    lengths = ", ".join(
        f"{length} tokens" + (f" from {share:.0%} of the budget" if share else "") for share, length in recipe.lengths
    )
    return f"""# The demo pair

A target and a draft small enough to be shipped with the package, so that speculative decoding can be seen,
tested and measured offline. They are Llama models in the Hugging Face layout:
`AutoModelForCausalLM.from_pretrained(folder)`. Not for any use but that: the target writes text in the style
of its corpus, and what it says means nothing.

| model | parameters | layers | hidden | query / KV heads | FFN | bfloat16 weights |
|---|---|---|---|---|---|---|
{_shape(numbers, "target", recipe)}
{_shape(numbers, "draft", recipe)}

Both share a byte-level BPE vocabulary of {recipe.target.vocabulary} entries, tied embeddings and a context of
{recipe.target.context} positions (trained on sequences of up to {recipe.block}). The target has many thin
layers on purpose: each costs a fixed overhead at batch 1, which a shallow draft does not pay.

## Data and licences

| part | what | licence |
|---|---|---|
| code | sources of the Python standard library, without tests and tables | PSF licence |
| docs | reStructuredText sources of the Python documentation (Debian package python3-doc) | PSF licence |
| kjv | King James Bible (Debian packages bible-kjv, bible-kjv-text) | public domain |

About 25 MB of text. One document (file or chapter) in 33 is held out, by a hash of its name. Every number
below was measured on held-out documents with the stored bfloat16 weights, computed in float32. `heldout.txt`
is a short excerpt of held-out documents (Python documentation: PSF licence, copyright Python Software
Foundation; King James Bible: public domain). The text of the PSF licence is `LICENSE-PSF`, beside the licence of this
project, under which the weights and the tokenizer are distributed.

## Recipe

What `specdec train demo-pair` does (resumable, CPU). Muon for the layers' matrices (Jordan et al. 2024), Adam for the
rest, {arithmetic}, learning rate linear to zero.

1. Target: {recipe.start_layers} layers first, then each repeated in place to make {recipe.target.layers}
   (Chang et al. 2018, arXiv:1710.10348) and trained on; sequences of {lengths}.
2. Sequence-level unlikelihood training (Welleck et al. 2020, arXiv:1908.04319) against repeated 4-grams,
   mixed with text, in {recipe.unlikelihood_rounds} rounds; the target is the mean of the weights at their ends.
3. Draft: distilled from the final target, cross-entropy against its whole distribution and in the second half
   more and more total variation distance (Zhou et al. 2024, arXiv:2310.08461), on training text and text of
   the target itself.
{notes}
| stage | steps | tokens | seconds on 2 cores |
|---|---|---|---|
{stages}

The machine was shared while it trained: seconds are an upper bound.

## Numbers

Bits per byte of held-out documents:

| domain | target | draft |
|---|---|---|
{held_bits}

alpha = mean over positions of sum min(p, q) at temperature 1 (the acceptance rate of a drawn draft token),
how often both arg-maxima agree, and what an arg-max draft would get under sampling:

| contexts | alpha | greedy agreement | p(argmax q) | positions |
|---|---|---|---|---|
{_domains(numbers["alpha_held_out"])}
{contexts}

distinct-4 (unique / all 4-grams) of 200 tokens after every prompt of `workload.json`; means: greedy
{work["greedy"]["distinct_4_mean"]:.3f}, sampled at T = 1 {work["sampled"]["distinct_4_mean"]:.3f}; text of the corpus
has {NATURAL}. {loops}

| prompt | greedy | T = 1 |
|---|---|---|
{per_prompt}

## Limits

English and Python of one corpus only; no instructions, no facts, no safety training. Names, verses and
signatures it writes are mostly invented. Speed-ups seen with this pair say how the engine behaves where a
forward pass is bound by overhead, not what a large model gains. Greedy text repeats itself more than natural text
does, which helps drafters that copy: judge those at T = 1.

Target weights: sha256 `{numbers["target"]["sha256"]}`.
"""

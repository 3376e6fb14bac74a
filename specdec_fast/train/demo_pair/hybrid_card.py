"""The model card of the hybrid target, written from the measured numbers.

Tests: tests/train/demo_pair/test_hybrid_pipeline.py.
"""

from __future__ import annotations

from typing import Any

from specdec_fast.train.demo_pair.recipe import HybridRecipe


def _row(label: str, row: dict[str, float]) -> str:
    return f"| {label} | {row['alpha']:.3f} | {row['greedy_agreement']:.3f} | {row['positions']:,} |"


def card(recipe: HybridRecipe, numbers: dict[str, Any], notes: str = "") -> str:
    """Returns the card as Markdown.

    Args:
        recipe: The recipe.
        numbers: The measured numbers.
        notes: How this run differed from the recipe.
    """
    facts, bits, work = numbers["target"], numbers["bits_per_byte"], numbers["workload"]
    attention = facts["layer_types"].count("full_attention")
    shape, notes = recipe.target, f"\n{notes.strip()}\n" if notes.strip() else ""
    stages = "\n".join(
        f"| {name} | {row['step']:,} | {row['tokens']:,} | {row['seconds']:.0f} |"
        for name, row in numbers["training"].items()
    )
    held_bits = "\n".join(
        f"| {kind} | {bits['hybrid'][kind]:.3f} | {bits['llama'][kind]:.3f} | {bits['draft'][kind]:.3f} |"
        for kind in bits["hybrid"]
    )
    with_draft = "\n".join(
        [
            *(_row(f"held-out, {kind}", row) for kind, row in numbers["alpha_held_out"].items()),
            _row("text sampled from the hybrid, T = 1", numbers["alpha_sampled_contexts"]),
            _row("greedy text of the hybrid", numbers["alpha_greedy_contexts"]),
        ]
    )
    with_llama = "\n".join(_row(f"held-out, {kind}", row) for kind, row in numbers["llama_held_out"].items())
    texts = f"{recipe.corpus_contexts:,} contexts of training text"
    if recipe.sampled_contexts:
        texts += f" and {recipe.sampled_contexts:,} that the Llama continued"
    loops = work["greedy"]["loops"]
    looping = (
        f"Greedy text ends in a loop after {len(loops)} prompts ({', '.join(loops)})."
        if loops
        else ("After no prompt of the workload does greedy text end in a loop.")
    )
    return f"""# The demo hybrid

A hybrid target small enough to be shipped with the package, so that speculative decoding over recurrent layers can be
seen, tested and measured offline. Its draft is `demo-draft`, and its tokenizer that of the demo pair. It is a
Qwen3.5 text model in the Hugging Face layout: `AutoModelForCausalLM.from_pretrained(folder)`. Not for any use but that:
it writes text in the style of its corpus, and what it says means nothing.

| parameters | layers | with attention | with a gated delta rule | hidden | FFN | bfloat16 weights |
|---|---|---|---|---|---|---|
| {facts["parameters"]:,} | {facts["layers"]} | {attention} | {facts["layers"] - attention} | {shape.hidden} \
| {shape.inner} | {facts["bytes"] / 1e6:.1f} MB |

Attention has {shape.heads} query and {shape.kv_heads} key-value heads of {shape.head_dim}. A delta rule has \
{shape.kv_heads} heads, each with a state
of {shape.head_dim} by {shape.head_dim}.

## Data and licences

The text and the licences are those of the demo pair; see `demo-pair.md`. The held-out documents are the same. Every
number below was measured on them with the stored bfloat16 weights, computed in float32.

## Recipe

What `specdec train demo-pair --hybrid` does (resumable, CPU), from the bundled Llama target:

1. Conversion: embeddings, MLPs, norms and every fourth layer's attention are copied. Delta rules start with the
   matrices of the attention that they replace (Wang et al. 2024, arXiv:2408.15237).
2. Mixers: each is trained to give the output of the attention at its place, from the same input (Bick et al. 2024,
   arXiv:2408.10189). All train at once, and nothing else does.
3. Hybrid: distilled as a whole, cross-entropy against the whole distribution of the Llama, on
   {texts} of {recipe.context} tokens each.

Muon for the layers' matrices (Jordan et al. 2024), Adam for the rest.
{notes}
| stage | steps | tokens | seconds |
|---|---|---|---|
{stages}

The machine was shared while it trained: seconds are an upper bound.

## Numbers

Bits per byte of held-out documents:

| domain | hybrid | Llama | draft |
|---|---|---|---|
{held_bits}

The hybrid with its draft. alpha is the mean over positions of sum min(p, q) at temperature 1, the acceptance rate of a
drawn draft token. Agreement is how often both arg-maxima agree.

| contexts | alpha | greedy agreement | positions |
|---|---|---|---|
{with_draft}

The hybrid with the Llama that it was made from:

| contexts | alpha | greedy agreement | positions |
|---|---|---|---|
{with_llama}

distinct-4 (unique / all 4-grams) of {recipe.workload_tokens} tokens after every prompt of `workload.json`; means: \
greedy {work["greedy"]["distinct_4_mean"]:.3f},
sampled at T = 1 {work["sampled"]["distinct_4_mean"]:.3f}. {looping}

## Limits

Those of the demo pair, and more: the hybrid was distilled on few tokens, and copies the Llama with an error.

Hybrid weights: sha256 `{facts["sha256"]}`. Made from target weights: sha256 `{numbers["made_from"]}`.
"""

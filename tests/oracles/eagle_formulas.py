"""EAGLE heads written out from a checkpoint's tensors: one text, no cache, no modules of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles import heads, models


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """Applies the rotary embedding to x [T, heads, dim], by halves of the vector."""
    half = x.shape[-1] // 2
    angle = places[:, None, None] * theta ** (-torch.arange(half) / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def attended(
    fed: Tensor, places: Tensor, tensors: dict[str, Tensor], stem: str, theta: float, window: int | None = None
) -> Tensor:
    """Causal attention with shared key heads, as in Llama; to the last `window` places alone."""
    q, k, v = (
        (fed @ tensors[f"{stem}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, heads.DIM)) for name in "qkv"
    )
    q, k = rotated(q, places, theta), rotated(k, places, theta)
    out = torch.empty_like(q)
    for at in range(len(fed)):
        first = 0 if window is None else max(0, at + 1 - window)
        for head in range(heads.HEADS):
            own = head * heads.KV_HEADS // heads.HEADS
            weights = (k[first : at + 1, own] @ q[at, head] * heads.DIM**-0.5).softmax(-1)
            out[at, head] = weights @ v[first : at + 1, own]
    return out.flatten(1) @ tensors[f"{stem}self_attn.o_proj.weight"].T


def mlp(x: Tensor, tensors: dict[str, Tensor], stem: str) -> Tensor:
    gate, up, down = (tensors[f"{stem}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@torch.no_grad()
def hidden_states(tokens: Sequence[int]) -> dict[str, Tensor]:
    """Returns the states [T, hidden] of the untouched tiny Llama by our names."""
    model, behind = models.untouched("llama"), []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, output: behind.append(output))
    found = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    hook.remove()
    count = len(found) - 1
    return {f"entering:{index}": found[index][0] for index in range(count)} | {
        f"entering:{count}": behind[0][0],
        "final_norm": found[-1][0],
    }


@torch.no_grad()
def first_eagle3_token(
    tensors: dict[str, Tensor],
    tokens: Sequence[int],
    names: Sequence[str],
    project: Callable[[Tensor], Tensor],
    *,
    window: int | None = None,
    norm_output: bool = False,
    embedding: Tensor | None = None,
) -> int:
    """Returns the likeliest token that an EAGLE-3 head drafts after `tokens`.

    tensors: those of the file, its layer under `midlayer.`; names: the states that it reads; project: normed features
    to logits over the target's ids. Norms and biases are applied where the file has them.
    """
    states, stem = hidden_states(tokens[:-1]), "midlayer."
    parts = [states[name] for name in names]
    if "fc_norm.0.weight" in tensors:
        parts = [norm(part, tensors[f"fc_norm.{at}.weight"]) for at, part in enumerate(parts)]
    features = torch.cat(parts, -1)
    if "input_norm.weight" in tensors:
        features = norm(features, tensors["input_norm.weight"])
    if "fc.weight" in tensors:
        features = features @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(()))
    table = models.untouched("llama").get_input_embeddings().weight if embedding is None else embedding
    embedded = norm(table[torch.tensor(list(tokens[1:]))], tensors[f"{stem}input_layernorm.weight"])
    fed = torch.cat([embedded, norm(features, tensors[f"{stem}hidden_norm.weight"])], -1)
    hidden = features + attended(fed, torch.arange(len(fed)), tensors, stem, 10_000.0, window)
    hidden = hidden + mlp(norm(hidden, tensors[f"{stem}post_attention_layernorm.weight"]), tensors, stem)
    return int(project(norm(hidden, tensors["norm.weight"]))[-1].argmax())


def first_draft(engine: Any, tokens: Sequence[int], params: Any) -> tuple[int, Any]:
    """Returns the first token that an engine's drafter proposes after a prompt, and the handle of the finished text."""
    drafter, seen = engine.drafter, []
    propose = drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        seen.append(draft.tokens.tolist())
        return draft

    drafter.propose = watched
    handle = engine.generate([list(tokens)], params)[0]
    del drafter.propose
    return seen[0][1] if len(seen[0]) > 1 else -1, handle

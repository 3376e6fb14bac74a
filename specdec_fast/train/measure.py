"""Numbers of a target and a draft: bits per byte, acceptance alpha, distinct-4, and text continued by a
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HeldDocument = tuple[str, np.ndarray, int]  # domain, token ids (the end token first), length in bytes


def distinct(tokens: Sequence[int], n: int = 4) -> float:
    """Unique n-grams / all n-grams; 1.0 when the text is shorter than n. Li et al. 2016 (arXiv:1510.03055).
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def overlap(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """alpha of each position: sum over tokens of min(p, q) at temperature 1. Logits [..., V] -> [...].

    The acceptance probability of a drawn draft token: Leviathan et al. 2023 (arXiv:2211.17192), section 3.
    """
    return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)


def windows(
    documents: Iterable[HeldDocument], length: int, limit: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Pieces of at most ``length + 1`` tokens that overlap by one, so that every token but the first is
    predicted once.

    ``limit`` bounds the tokens taken per domain.
    """
    taken: dict[str, int] = {}
    for domain, ids, _ in documents:
        for start in range(0, len(ids) - 1, length):
            if limit is not None and taken.get(domain, 0) >= limit:
                break
            piece = torch.from_numpy(ids[start : start + length + 1].astype(np.int64))[None]
            taken[domain] = taken.get(domain, 0) + piece.shape[1] - 1
            yield domain, piece


@torch.no_grad()
def bits_per_byte(
    model: LlamaForCausalLM, documents: Sequence[HeldDocument], length: int = 1024
) -> dict[str, float]:
    """Bits per byte by domain and over ``all``: code length of the tokens / bytes of the text."""
    bits: dict[str, float] = {}
    size: dict[str, int] = {}
    for domain, piece in windows(documents, length):
        logits = model(input_ids=piece[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), piece[:, 1:].flatten(), reduction="sum"
        )
        bits[domain] = bits.get(domain, 0.0) + float(loss) / math.log(2)
    for domain, _, length_in_bytes in documents:
        size[domain] = size.get(domain, 0) + length_in_bytes
    result = {domain: bits[domain] / size[domain] for domain in bits}
    result["all"] = sum(bits.values()) / max(sum(size.values()), 1)
    return result


@torch.no_grad()
def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, pieces: Iterable[tuple[str, Tensor]], skip: int = 0
) -> dict[str, dict[str, float]]:
    """alpha, greedy agreement and p(argmax q) by kind of piece and over ``all``; the first ``skip`` tokens
    are context.
    """
    sums: dict[str, np.ndarray] = {}
    for kind, piece in pieces:
        p = target(input_ids=piece[:, :-1], use_cache=False).logits[:, skip:]
        q = draft(input_ids=piece[:, :-1], use_cache=False).logits[:, skip:]
        favourite = q.argmax(-1, keepdim=True)
        row = np.array(
            [
                p[..., 0].numel(),
                overlap(p, q).sum(),
                (p.argmax(-1, keepdim=True) == favourite).sum(),
                p.float().softmax(-1).gather(-1, favourite).sum(),
            ],
            dtype=np.float64,
        )
        for name in (kind, "all"):
            sums[name] = sums.get(name, np.zeros(4)) + row
    return {
        kind: {
            "alpha": row[1] / row[0],
            "greedy_agreement": row[2] / row[0],
            "p_of_draft_argmax": row[3] / row[0],
            "positions": int(row[0]),
        }
        for kind, row in sums.items()
    }


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM,
    prefix: Tensor,
    count: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Each row of ``prefix [B, n]`` continued by ``count`` tokens, int64 [B, n + count]; temperature 0 is
    greedy.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens, fed = prefix, prefix
    for _ in range(count):
        logits = (
            model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1]
            .float()
        )
        if temperature == 0.0:
            fed = logits.argmax(-1, keepdim=True)
        else:
            fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens

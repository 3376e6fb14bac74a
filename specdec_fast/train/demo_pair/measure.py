"""Measurements of a target and a draft: bits per byte, acceptance alpha, distinct-4, and generated text."""

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
    """Returns the share of distinct n-grams, 1.0 if the text is shorter than n (Li et al. 2016, arXiv:1510.03055)."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_length(tokens: Sequence[int], least: int = 16) -> int:
    """Measures a loop at the end of a text.

    Args:
        tokens: The text.
        least: Smallest length of a loop.

    Returns:
        Number of final tokens that repeat the token one period before. 0 unless these are at least two periods and
        `least` tokens.
    """
    size = len(tokens)
    for period in range(1, size // 3 + 1):
        run = 0
        while run < size - period and tokens[size - 1 - run] == tokens[size - 1 - run - period]:
            run += 1
        if run >= max(2 * period, least):
            return run
    return 0


def overlap(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Computes the acceptance probability alpha of a sampled draft token: the sum of min(p, q) at temperature 1.

    Args:
        target_logits: [..., V].
        draft_logits: [..., V].

    Returns:
        alpha of each position, float32 [...].

    Source:
        Leviathan et al. 2023 (arXiv:2211.17192), section 3.
    """
    return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)


def windows(documents: Iterable[HeldDocument], length: int, limit: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Splits documents into pieces that overlap by one token, so that only the first token is not predicted.

    Args:
        documents: Held-out documents.
        length: Predicted tokens of a piece.
        limit: Number of tokens per domain, approximately, from evenly spread pieces. None: all.

    Yields:
        Domain and tokens, int64 [1, at most length + 1].
    """
    pieces: dict[str, list[np.ndarray]] = {}
    for domain, ids, _ in documents:
        pieces.setdefault(domain, []).extend(
            ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)
        )
    for domain, found in pieces.items():
        if limit is not None and len(found) * length > limit:
            whole = [piece for piece in found if len(piece) == length + 1] or found
            picked = np.linspace(0, len(whole) - 1, max(limit // length, 1)).astype(int)
            found = [whole[i] for i in sorted(set(picked.tolist()))]
        for piece in found:
            yield domain, torch.from_numpy(piece.astype(np.int64))[None]


def bytes_per_token(documents: Sequence[HeldDocument]) -> dict[str, float]:
    """Returns the bytes of text per predicted token, by domain."""
    counts: dict[str, list[int]] = {}
    for domain, ids, size in documents:
        row = counts.setdefault(domain, [0, 0])
        row[0] += size
        row[1] += len(ids) - 1
    return {domain: size / tokens for domain, (size, tokens) in counts.items()}


def bits_per_byte(rows: dict[str, dict[str, float]], documents: Sequence[HeldDocument], who: str) -> dict[str, float]:
    """Converts bits per token to bits per byte.

    Args:
        rows: Result of `acceptance`.
        documents: Held-out documents.
        who: "target" or "draft".

    Returns:
        Bits per byte by domain, and over "all", where domains are weighted by their bytes.
    """
    size = bytes_per_token(documents)
    total = {domain: sum(n for d, _, n in documents if d == domain) for domain in size}
    bits = {domain: rows[domain][f"{who}_bits_per_token"] / size[domain] for domain in size if domain in rows}
    bits["all"] = sum(bits[d] * total[d] for d in bits) / sum(total[d] for d in bits)
    return bits


@torch.no_grad()
def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, pieces: Iterable[tuple[str, Tensor]], skip: int = 0
) -> dict[str, dict[str, float]]:
    """Measures alpha, greedy agreement, p(argmax q) and bits per token.

    Args:
        target: The target.
        draft: The draft.
        pieces: Kind and tokens of each piece.
        skip: Number of tokens at the start of a piece that are context only.

    Returns:
        The measurements by kind of piece, and over "all".
    """
    sums: dict[str, np.ndarray] = {}
    for kind, piece in pieces:
        p, q = (
            model(input_ids=piece[:, :-1], use_cache=False).logits[:, skip:].float().log_softmax(-1)
            for model in (target, draft)
        )
        favourite, following = q.argmax(-1, keepdim=True), piece[:, 1 + skip :, None]
        row = np.array(
            [
                p[..., 0].numel(),
                float(overlap(p, q).sum()),
                float((p.argmax(-1, keepdim=True) == favourite).sum()),
                float(p.gather(-1, favourite).exp().sum()),
                -float(p.gather(-1, following).sum()) / math.log(2),
                -float(q.gather(-1, following).sum()) / math.log(2),
            ]
        )
        for name in (kind, "all"):
            sums[name] = sums.get(name, np.zeros(6)) + row
    names = ("alpha", "greedy_agreement", "p_of_draft_argmax", "target_bits_per_token", "draft_bits_per_token")
    return {
        kind: {
            **{name: float(value / row[0]) for name, value in zip(names, row[1:], strict=True)},
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
    mask: Tensor | None = None,
) -> Tensor:
    """Continues every row by `count` tokens.

    Args:
        model: The model.
        prefix: Tokens, int64 [B, n].
        count: New tokens.
        temperature: Sampling temperature; 0 is greedy.
        generator: Source of randomness.
        mask: 0 for left padding, int64 [B, n]; None without padding.

    Returns:
        Prefixes and new tokens, int64 [B, n + count].
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens, fed = prefix, prefix
    mask = torch.ones_like(prefix) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = bool((mask == 0).any())
    for _ in range(count):
        logits = (
            model(
                input_ids=fed,
                attention_mask=mask if padded else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
        )
        if temperature == 0.0:
            fed = logits.argmax(-1, keepdim=True)
        else:
            fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, fed], dim=1)
        mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
        positions = positions[:, -1:] + 1
    return tokens

"""Tiny models for vLLM, the exact distribution of their texts, and how an engine on them is made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles.chi_square import p_value

VOCAB = 16
PROMPT = [3, 7, 1, 9, 3, 7, 1, 9, 3]


def make_models(folder: Path) -> None:
    """Writes a target of 16 tokens, and a draft model: the target with disturbed weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    with torch.no_grad():
        for weight in matrices:
            weight.normal_(0, 0.15)
        model.lm_head.weight.mul_(1.2)
        model.save_pretrained(folder / "target")
        for weight in matrices:
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder / "draft")


def engine_options() -> dict[str, Any]:
    """Arguments of `LLM` for the tiny models."""
    return {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 64, "disable_log_stats": False,
        "enable_prefix_caching": False, "skip_tokenizer_init": True,
    }  # fmt: skip


def next_law(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Distributions of tokens as the documentation of vLLM defines them, float64 [N, V]."""
    logits = logits.double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, ordered.masked_fill(before >= top_p, -torch.inf))
    return logits.softmax(-1)


def joint_law(folder: Path, **sampling: Any) -> np.ndarray:
    """Exact joint distribution of the three tokens after the prompt, [V, V, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    law = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(3):
            following = next_law(model(texts).logits[:, -1], **sampling)
            law = (law[:, None] * following).flatten()
            ids = torch.arange(VOCAB).repeat(len(texts))
            texts = torch.cat([texts.repeat_interleave(VOCAB, 0), ids[:, None]], 1)
    return law.view(VOCAB, VOCAB, VOCAB).numpy()


def counts_p(drawn: np.ndarray, law: np.ndarray) -> float:
    """p of Pearson's test of drawn triples [N, 3] against their distribution."""
    return p_value(Counter(map(tuple, drawn.tolist())), {cell: float(law[cell]) for cell in np.ndindex(law.shape)})

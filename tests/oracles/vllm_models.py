"""Tiny models for vLLM, the exact distribution of their texts, and how an engine on them is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oracles.chi_square import p_value

VOCAB = 16
PROMPT = [3, 7, 1, 9, 3, 7, 1, 9, 3]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers may share cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # so that tests may look into workers
    "HF_HUB_OFFLINE": "1",
}
OWN_DRAFTERS = {"suffix": "SuffixDrafter", "ngram": "NgramDrafter", "recycling": "RecyclingDrafter"}
Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


def speculation(folder: Path, drafts: str, count: int = 3) -> dict[str, Any] | None:
    """vLLM's `speculative_config`: drafts are "none", "greedy", "sampled" or one of `OWN_DRAFTERS`."""
    if drafts == "none":
        return None
    if drafts in OWN_DRAFTERS:
        name = f"specdec_fast.integrations.vllm.drafters.{OWN_DRAFTERS[drafts]}"
        return {"method": "custom_class", "model": name, "num_speculative_tokens": count}
    method = {"greedy": "greedy", "sampled": "probabilistic"}[drafts]
    return {
        "method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": count,
        "draft_sample_method": method,
    }  # fmt: skip


def engine_options(folder: Path, rule: str | None, drafts: str = "none", **options: Any) -> dict[str, Any]:
    """Arguments of `LLM` for the tiny models."""
    asked = {} if rule is None else {"specdec": {"rule": rule}}
    return {
        "model": str(folder / "target"), "speculative_config": speculation(folder, drafts), "additional_config": asked,
        "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 64, "disable_log_stats": False,
        "enable_prefix_caching": False, "skip_tokenizer_init": True, "num_gpu_blocks_override": 80, **options,
    }  # fmt: skip


def generate(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[list[int]]:
    """New tokens of each prompt."""
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(each.outputs[0].token_ids) for each in engine.generate(asked, list(params), use_tqdm=False)]


def draw_triples(engine: Any, count: int, **sampling: Any) -> np.ndarray:
    """The first three of four tokens after the prompt, for seeds 1 to `count`, [count, 3]."""
    from vllm import SamplingParams

    fixed = {"max_tokens": 4, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**{"seed": seed + 1, **fixed, **sampling}) for seed in range(count)]
    return np.array(generate(engine, [PROMPT] * count, params))[:, :3]


def metric(engine: Any, name: str) -> float:
    """A counter of the engine of this process that was made last."""
    return sum(each.value for each in engine.get_metrics() if each.name == f"vllm:{name}")


def runner_of(engine: Any) -> Any:
    """The model runner of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def reference(folder: Path) -> Any:
    """The target as a model of transformers, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "target").double().eval()


def next_law(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Distributions of tokens as vLLM's documentation defines them, float64 [N, V]."""
    logits = logits.double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, ordered.masked_fill(before >= top_p, -torch.inf))
    return logits.softmax(-1)


def penalized(repetition: float, presence: float, frequency: float) -> Processors:
    """vLLM's penalties, from texts [N, L] that start with the prompt and logits [N, V]."""

    def apply(texts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        everywhere = torch.nn.functional.one_hot(texts, VOCAB).sum(1)
        new = texts[:, len(PROMPT) :]
        counts = torch.nn.functional.one_hot(new, VOCAB).sum(1) if new.shape[1] else torch.zeros_like(everywhere)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(everywhere > 0, scaled, logits) - frequency * counts - presence * (counts > 0)

    return apply


def joint_law(folder: Path, processors: Processors | None = None, **sampling: Any) -> np.ndarray:
    """Exact joint distribution of the three tokens after the prompt, [V, V, V]."""
    model = reference(folder)
    law, texts = torch.ones(1, dtype=torch.float64), torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(3):
            logits = model(texts).logits[:, -1]
            logits = logits if processors is None else processors(texts, logits)
            law = (law[:, None] * next_law(logits, **sampling)).flatten()
            ids = torch.arange(VOCAB).repeat(len(texts))
            texts = torch.cat([texts.repeat_interleave(VOCAB, 0), ids[:, None]], 1)
    return law.view(VOCAB, VOCAB, VOCAB).numpy()


def p_of_triples(drawn: np.ndarray, law: np.ndarray) -> float:
    """p of Pearson's test of drawn triples [N, 3] against their distribution."""
    return p_value(Counter(map(tuple, drawn.tolist())), {cell: float(law[cell]) for cell in np.ndindex(law.shape)})

"""Forward passes of Llama-like models in one operator call, and chains. Tests: tests/targets/test_fused_forward.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import PagedCache
from specdec_fast.targets.attention import PackedContext
from specdec_fast.targets.linear_layers import BatchInvariantLinear
from specdec_kernels import DecoderLayer, DecoderTable, draft_chain, fused_forward

__all__ = ["FusedForward", "fused_forward", "why_not_fused", "widen_small_model"]

_LLAMA = "LlamaForCausalLM"
SMALL_MODEL_BYTES = 2**25
"""Size of weights in float32 that fit into a processor's cache."""
_MODULE_TYPES = {
    "_proj": BatchInvariantLinear.__name__,
    "lm_head": BatchInvariantLinear.__name__,
    "embed_tokens": "Embedding",
    "norm": "LlamaRMSNorm",
    "rotary_emb": "LlamaRotaryEmbedding",
    "mlp": "LlamaMLP",
    "self_attn": "LlamaAttention",
}
"""Types of a Llama's modules, by the ends of their names."""


def why_not_fused(model: Any) -> str | None:
    """Returns why `fused_forward` cannot replace a model's own forward, or None if it can.

    Args:
        model: A transformers model.
    """
    if type(model).__name__ != _LLAMA or not type(model).__module__.startswith("transformers."):
        return f"the model is {type(model).__name__}; expected transformers' {_LLAMA}"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"the model is {model.dtype} on {model.device.type}; expected torch.float32 on cpu"
    if model.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {model.config.hidden_act}; expected silu"
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        expected = next((kind for end, kind in _MODULE_TYPES.items() if last.endswith(end)), None)
        if expected is not None and type(module).__name__ != expected:
            return f"{name} is {type(module).__name__}; expected {expected}"
        if getattr(module, "bias", None) is not None:
            return f"{name} is {type(module).__name__} with a bias; expected one without"
        if "forward" in module.__dict__:
            return f"{name or 'the model'} has a forward of its own, which would not be called"
        if _has_hooks(module):
            return f"{name or 'the model'} has forward hooks, which would not be called"
    return None


def widen_small_model(model: Any) -> Any:
    """Converts a small Llama-like model in half precision on a CPU to float32, in place.

    Its passes can then be fused. The calls of its modules cost more time than its weights do.

    Args:
        model: A transformers model.

    Returns:
        The same model. Other models are unchanged.
    """
    small = 4 * sum(each.numel() for each in model.parameters()) <= SMALL_MODEL_BYTES
    half = model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16)
    return model.float() if small and half and type(model).__name__ == _LLAMA else model


def _has_hooks(module: Any) -> bool:
    """Whether a user registered hooks. Hooks of transformers only record states for callers of the model's forward."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(getattr(each, "__module__", "")).startswith("transformers.") for each in hooks)


@dataclass(slots=True)
class FusedForward:
    """A packed pass of a model (`build_packed_forward`) by the operator `fused_forward`.

    Attributes:
        table: Weights and constants of the model.
        cache: The paged cache.
    """

    table: DecoderTable
    cache: PagedCache
    run: Callable[..., Tensor]
    """Backend of `fused_forward`."""
    run_chain: Callable[..., Tensor | tuple[Tensor, ...]]
    """Backend of `draft_chain`."""

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: PackedContext) -> Tensor:
        """Runs the pass. Returns logits of all nodes [M, V], or of the `wanted` ones [N, V]."""
        at = packed.slots
        trees = (at.page_table, at.lengths, at.offsets, at.ancestors, at.depth)
        return self.run(self.table, tokens, positions, wanted, at.slots, *trees)

    def chain(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        counts: Sequence[int],
        temperature: Tensor | None,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        roots: Tensor,
        vocab_size: int,
        first_draw: int | None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Feeds tokens to rows, as `extend` does, and drafts chains behind them. The caller has reserved pages.

        Args:
            rows: Row of each request, int32 [B].
            tokens: Packed tokens, int64 [M].
            offsets: First token of each request, int32 [B + 1].
            counts: Tokens to draft per request.
            temperature: Temperature of each request, float32 [B]; None for greedy picks.
            top_k: Top-k of each request, int32 [B].
            top_p: Top-p of each request, float32 [B].
            min_p: Min-p of each request, float32 [B].
            seeds: Seed of each request, int64 [B].
            roots: Position of each root, int32 [B].
            vocab_size: Ids beyond it are masked.
            first_draw: Number of the first draw if tokens are sampled; None picks with the noise of rule `replay`.

        Returns:
            The result of `specdec_kernels.draft_chain`: tokens, and distributions if tokens are sampled.
        """
        where = rows, self.cache.page_table, self.cache.lengths
        params = temperature, top_k, top_p, min_p, seeds, roots
        return self.run_chain(self.table, tokens, offsets, counts, *where, *params, vocab_size, first_draw)


def build_fused_forward(model: Any, cache: PagedCache) -> FusedForward:
    """Builds the fused forward of a model over its cache.

    Weights stay in place and may be changed in place. After replacing a weight, build another target.

    Args:
        model: A model for which `why_not_fused` is None.
        cache: The target's cache.

    Returns:
        The fused forward.

    Raises:
        ValueError: If the compiled operator is missing or cannot read the weights.
    """
    base, config = model.model, model.config
    positions = torch.arange(min(cache.max_length, config.max_position_embeddings), device="cpu")
    with torch.no_grad():
        found = base.rotary_emb(torch.zeros(1, dtype=torch.float32, device="cpu"), positions[None])
    table = DecoderTable(
        base.embed_tokens.weight,
        [_layer_weights(each) for each in base.layers],
        base.norm.weight,
        model.lm_head.weight,
        torch.cat([part[0].chunk(2, 1)[0] for part in found], 1),
        cache.keys,
        cache.values,
        eps=float(config.rms_norm_eps),
        scale=float(base.layers[0].self_attn.scaling),
    )
    if table.obstacle is not None:
        raise ValueError(table.obstacle)
    one = torch.zeros(1, dtype=torch.int64, device="cpu")
    length = one.int()
    name, run = fused_forward.bind_backend(
        table, one, one, None, one, length[None], length, torch.cat([length, length + 1])
    )
    if name != "cpu":
        raise ValueError(f"fused_forward is served by {name}; expected cpu, the compiled extension")
    return FusedForward(table, cache, run, draft_chain.bind_backend(table, one)[1])


def _layer_weights(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        norm=layer.input_layernorm.weight,
        query=attention.q_proj.weight,
        key=attention.k_proj.weight,
        value=attention.v_proj.weight,
        out=attention.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
    )

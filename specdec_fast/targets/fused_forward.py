"""Forward passes of Llama, Mistral, Qwen and Gemma models in one operator call, and chains.

Tests: tests/targets/test_fused_forward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import PagedCache
from specdec_fast.targets.attention import PackedContext
from specdec_fast.targets.int8_weights import Int8Linear
from specdec_fast.targets.linear_layers import BatchInvariantLinear
from specdec_fast.targets.sharding import why_not_whole
from specdec_kernels import DecoderLayer, DecoderNumbers, DecoderTable, draft_chain, fused_forward

__all__ = ["FusedForward", "fused_forward", "why_not_fused", "widen_small_model"]

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
"""Families of transformers' models whose code is what `DecoderTable` can describe, by the beginning of class names."""
SMALL_MODEL_BYTES = 2**25
"""Size of weights in float32 that fit into a processor's cache."""
_LAYER_MODULES = {
    "self_attn": "Attention", "mlp": "MLP", "input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm",
    "pre_feedforward_layernorm": "RMSNorm", "post_feedforward_layernorm": "RMSNorm", "q_norm": "RMSNorm",
    "k_norm": "RMSNorm", "norm": "RMSNorm", "rotary_emb": "RotaryEmbedding",
}  # fmt: skip
"""Types of modules, as ends of class names behind the family."""
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SCALES = tuple(each.name for each in fields(DecoderLayer) if each.name.endswith("_scale"))
_MATRICES = tuple(name.removesuffix("_scale") for name in _SCALES)
_BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")


def why_not_fused(model: Any) -> str | None:
    """Returns why `fused_forward` cannot replace a model's own forward, or None if it can.

    Args:
        model: A transformers model.
    """
    family = type(model).__name__.removesuffix("ForCausalLM")
    if (reason := why_not_whole(model)) is not None:
        return reason
    if family not in _FAMILIES or not type(model).__module__.startswith("transformers."):
        expected = ", ".join(f"{each}ForCausalLM" for each in _FAMILIES)
        return f"the model is {type(model).__name__}; expected one of transformers' {expected}"
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return f"the model is {model.dtype} on {model.device.type}; expected torch.float32 or torch.bfloat16 on cpu"
    activation = _activation_name(model.config)
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}; expected {' or '.join(_ACTIVATIONS)}"
    rounded = [isinstance(each, Int8Linear) for each in model.modules() if hasattr(each, "in_features")]
    if any(rounded) and not all(rounded):
        return "some linear layers have int8 weights and others do not; expected all or none"
    for name, module in model.named_modules():
        reason = _why_not_module(family, name, module)
        if reason is not None:
            return reason
        if "forward" in module.__dict__:
            return f"{name or 'the model'} has a forward of its own, which would not be called"
        if _has_hooks(module):
            return f"{name or 'the model'} has forward hooks, which would not be called"
    return None


def _why_not_module(family: str, name: str, module: Any) -> str | None:
    """Returns why a module is not what `DecoderTable` describes, or None."""
    last, found = name.rpartition(".")[2], type(module).__name__
    expected: tuple[str, ...] = ()
    if last.endswith("_proj") or last == "lm_head":
        expected = (BatchInvariantLinear.__name__, Int8Linear.__name__)
    elif last == "embed_tokens":
        expected = ("Embedding", f"{family}TextScaledWordEmbedding")
    elif last in _LAYER_MODULES:
        expected = (family + _LAYER_MODULES[last],)
    if expected and found not in expected:
        return f"{name} is {found}; expected {' or '.join(expected)}"
    if last not in _BIASED and getattr(module, "bias", None) is not None:
        return f"{name} is {found} with a bias; expected one without"
    return None


def _activation_name(config: Any) -> str:
    """Name of the activation. Gemma's configurations have it under a name of their own."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


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
    fits = type(model).__name__.removesuffix("ForCausalLM") in _FAMILIES
    return model.float() if small and half and fits else model


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
    run: Callable[..., Any]
    """Backend of `fused_forward`."""
    run_chain: Callable[..., Tensor | tuple[Tensor, ...]] | None
    """Backend of `draft_chain`, or None if it does not serve the dtype."""

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: PackedContext) -> Tensor:
        """Runs the pass. Returns logits of all nodes [M, V], or of the `wanted` ones [N, V]."""
        at = packed.slots
        trees = (at.page_table, at.lengths, at.offsets, at.ancestors, at.depth)
        logits: Tensor = self.run(self.table, tokens, positions, wanted, at.slots, *trees)
        return logits

    def run_with_states(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: PackedContext, states: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Runs the pass. Returns the same logits, and hidden states [S, M, hidden] as numbered by the operator."""
        at = packed.slots
        trees = (at.page_table, at.lengths, at.offsets, at.ancestors, at.depth)
        found: Any = self.run(self.table, tokens, positions, wanted, at.slots, *trees, states)
        return found

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
        assert self.run_chain is not None
        where = rows, self.cache.page_table, self.cache.lengths
        params = temperature, top_k, top_p, min_p, seeds, roots
        return self.run_chain(self.table, tokens, offsets, counts, *where, *params, vocab_size, first_draw)


def build_fused_forward(model: Any, cache: PagedCache, windows: Sequence[int]) -> FusedForward:
    """Builds the fused forward of a model over its cache.

    Weights stay in place and may be changed in place. After replacing a weight, build another target.

    Args:
        model: A model for which `why_not_fused` is None.
        cache: The target's cache.
        windows: Window of each layer in tokens, 0 for none.

    Returns:
        The fused forward.

    Raises:
        ValueError: If the compiled operator is missing or cannot read the weights.
    """
    base, config = model.model, model.config
    kinds, rotary = _rotary_tables(model, min(cache.max_length, config.max_position_embeddings))
    attention = base.layers[0].self_attn
    numbers = DecoderNumbers(
        eps=float(config.rms_norm_eps),
        scale=float(attention.scaling),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        logits_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        embedding_scale=_embedding_scale(base.embed_tokens),
        norm_offset=_norm_offset(base.norm),
        activation=_ACTIVATIONS[_activation_name(config)],
    )
    layers = [_layer_weights(*each) for each in zip(base.layers, windows, kinds, strict=True)]
    head, head_scale = _matrix(model.lm_head)
    ends = base.norm.weight, head, rotary
    table = DecoderTable(base.embed_tokens.weight, layers, *ends, cache.keys, cache.values, numbers, head_scale)
    if table.obstacle is not None:
        raise ValueError(table.obstacle)
    one = torch.zeros(1, dtype=torch.int64, device="cpu")
    length = one.int()
    name, run = fused_forward.bind_backend(
        table, one, one, None, one, length[None], length, torch.cat([length, length + 1])
    )
    if name != "cpu":
        raise ValueError(f"fused_forward is served by {name}; expected cpu, the compiled extension")
    run_chain = None if table.is_bfloat16 else draft_chain.bind_backend(table, one)[1]
    return FusedForward(table, cache, run, run_chain)


def _embedding_scale(embedding: Any) -> float:
    """The factor of the embeddings, in their precision."""
    scale = getattr(embedding, "embed_scale", None)
    return 1.0 if scale is None else float(scale.to(embedding.weight.dtype))


@torch.no_grad()
def _norm_offset(norm: Any) -> float:
    """What a norm adds to its weight: 1 in Gemma's, 0 in others. The output for ones shows it."""
    ones = torch.ones(1, norm.weight.shape[0], dtype=norm.weight.dtype, device="cpu")
    return float((norm(ones) - norm.weight).float().mean().round())


@torch.no_grad()
def _rotary_tables(model: Any, positions: int) -> tuple[list[int], Tensor]:
    """Returns the index of each layer's table, and the tables [R, positions, width]."""
    rotary, count = model.model.rotary_emb, len(model.model.layers)
    given = torch.zeros(1, dtype=model.dtype, device="cpu"), torch.arange(positions, device="cpu")[None]
    by_layer = list(model.config.layer_types) if hasattr(rotary, "layer_types") else []  # a table by type of layer
    types: list[Any] = sorted(set(by_layer)) or [None]
    found = [rotary(*given) if kind is None else rotary(*given, layer_type=kind) for kind in types]
    tables = torch.stack([torch.cat([part[0].chunk(2, 1)[0] for part in each], 1) for each in found])
    return [types.index(kind) for kind in by_layer or [None] * count], tables


def _matrix(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight of a linear layer as it is stored, and its scale if that is int8."""
    return (layer.values, layer.scale) if isinstance(layer, Int8Linear) else (layer.weight, None)


def _layer_weights(layer: Any, window: int, rotary: int) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    linear = (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    matrices = [_matrix(each) for each in linear]
    # Gemma 2 and 3: four norms, and the one behind attention is named as the one before the MLP elsewhere
    four = hasattr(layer, "pre_feedforward_layernorm")
    before_mlp = layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm
    return DecoderLayer(
        norm=layer.input_layernorm.weight,
        mlp_norm=before_mlp.weight,
        **{name: weight for name, (weight, _) in zip(_MATRICES, matrices)},
        **{name: scale for name, (_, scale) in zip(_SCALES, matrices)},  # type: ignore[arg-type]
        query_bias=attention.q_proj.bias,
        key_bias=attention.k_proj.bias,
        value_bias=attention.v_proj.bias,
        out_bias=attention.o_proj.bias,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        post_norm=layer.post_attention_layernorm.weight if four else None,
        mlp_post_norm=layer.post_feedforward_layernorm.weight if four else None,
        window=window,
        rotary=rotary,
    )

"""Passes of Llama-like models as one operator call. Tests: tests/targets/test_whole_pass.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import PagedCache
from specdec_fast.targets.attention import PackedContext
from specdec_fast.targets.weight_layout import RowLinear
from specdec_kernels import DecoderLayer, DecoderTable, decoder_pass

__all__ = ["WholePass", "whole_pass", "why_not_whole"]

_LLAMA = "LlamaForCausalLM"
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def why_not_whole(model: Any) -> str | None:
    """Why `decoder_pass` cannot stand for a model's own forward; None where it can."""
    if type(model).__name__ != _LLAMA or not type(model).__module__.startswith("transformers."):
        return f"the model is {type(model).__name__}; expected transformers' {_LLAMA}"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"the model is {model.dtype} on {model.device.type}; expected torch.float32 on cpu"
    if model.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {model.config.hidden_act}; expected silu"
    for layer in model.model.layers:
        for name in (*_PROJECTIONS, *_GATED):
            module = layer.get_submodule(name)
            if type(module) is not RowLinear or module.bias is not None:
                what = type(module).__name__ if type(module) is not RowLinear else "a linear layer with a bias"
                return f"{name} is {what}; expected a linear layer of `row_linear` without one"
    hooked = next((name for name, module in model.named_modules() if _has_hooks(module)), None)
    if hooked is not None:
        return f"{hooked or 'the model'} has forward hooks, which would not be called"
    return None


def _has_hooks(module: Any) -> bool:
    """Hooks of its user's: those of transformers record states for callers of the model's own forward."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(getattr(each, "__module__", "")).startswith("transformers.") for each in hooks)


@dataclass(slots=True)
class WholePass:
    """A packed pass of a model (`packed_logits`) by `decoder_pass`."""

    table: DecoderTable
    run: Callable[..., Tensor]
    """The operator's backend itself."""

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None, packed: PackedContext) -> Tensor:
        at = packed.slots
        trees = (at.page_table, at.lengths, at.offsets, at.ancestors, at.depth)
        return self.run(self.table, tokens, positions, wanted, at.slots, *trees)


def whole_pass(model: Any, cache: PagedCache) -> WholePass:
    """The passes of a model that `why_not_whole` has nothing against, over its cache.

    Weights that are read one after the other are laid side by side; the model's own are views of them from then on.
    Raises ValueError where the compiled operator cannot read them.
    """
    base, config = model.model, model.config
    places = torch.arange(min(cache.max_length, config.max_position_embeddings))
    with torch.no_grad():
        angles = [part[0].chunk(2, 1)[0] for part in base.rotary_emb(torch.zeros(1), places[None])]
    layers = [_layer(each) for each in base.layers]
    table = DecoderTable(
        base.embed_tokens.weight.data,
        layers,
        base.norm.weight.data,
        model.lm_head.weight.data,
        torch.cat(angles, 1),
        cache.keys,
        cache.values,
        eps=float(config.rms_norm_eps),
        scale=float(base.layers[0].self_attn.scaling),
    )
    if table.obstacle is not None:
        raise ValueError(table.obstacle)
    one = torch.zeros(1, dtype=torch.int64)
    shape = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
    )
    name, run = decoder_pass.bound(table, one, one, None, one, *shape)
    if name != "cpu":
        raise ValueError(f"decoder_pass is served by {name}; expected cpu, the compiled extension")
    return WholePass(table, run)


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        norm=layer.input_layernorm.weight.data,
        qkv=_side_by_side([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=attention.o_proj.weight.data,
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.data,
    )


def _side_by_side(modules: Sequence[Any]) -> Tensor:
    """The weights of linear layers with one input as one matrix stored by input; the layers get views of it."""
    counts = [module.weight.shape[0] for module in modules]
    first, outputs = modules[0].weight.data, sum(counts)
    starts = [first.data_ptr() + first.element_size() * sum(counts[:at]) for at in range(len(counts))]
    if first.stride() == (1, outputs) and starts == [
        module.weight.data_ptr() for module in modules
    ]:  # of an earlier target
        return first.as_strided((outputs, first.shape[1]), (1, outputs))
    whole = torch.cat([module.weight.data for module in modules]).t().contiguous().t()
    for module, part in zip(modules, whole.split(counts)):
        module.weight.data = part
    return whole

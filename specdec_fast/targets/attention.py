"""The attention function that transformers models call in place of their own: paged, packed and tree-aware.

It is registered under one name in transformers' AttentionInterface. No mask function is registered, so models build no
mask. The context of a forward pass travels in a keyword argument. Tests: tests/targets/test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from specdec_fast.cache.paged import LayerShape
from specdec_fast.interfaces import Slots
from specdec_kernels import AttentionPlan, kv_stage, plan_for, tree_attention
from specdec_kernels.triton_shared.triton_backend import INTERPRETED

NAME = "specdec_paged"


@dataclass(slots=True)
class PackedContext:
    """The context of one forward pass, which every attention layer receives.

    Attributes:
        slots: Places of the staged nodes.
        keys: Keys by layer, [num_pages, page_size, heads, dim] each.
        values: Values by layer.
        plans: Attention plans by kind of layer.
        hidden_states: Hidden states of this pass, by name.
    """

    slots: Slots
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    plans: dict[Hashable, AttentionPlan | None] = field(default_factory=dict)
    hidden_states: dict[str, Tensor] = field(default_factory=dict)

    def plan(self, query: Tensor, keys: Tensor, window: int) -> AttentionPlan | None:
        """Returns the attention plan of GPU kernels. The first layer of a kind builds it, and the others reuse it.

        Compiled passes have no plans here: the operator that they call builds its own (`share_attention_plans`).
        """
        if (query.is_cpu and not INTERPRETED) or is_compiling():
            return None
        kind = (query.shape, query.dtype, keys.shape[1:], keys.dtype, window)
        if kind not in self.plans:
            at = self.slots
            rest = (at.page_table, at.lengths, at.offsets, at.ancestors)
            self.plans[kind] = plan_for(query, keys, *rest, window=window)
        return self.plans[kind]


@dataclass(slots=True)
class Probe:
    """Records the attention module and the key/value shape of every layer in a dry run."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)


class OutsideTargetError(RuntimeError):
    """A call of the attention function without the context of a packed pass."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed: PackedContext | Probe | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of packed nodes over the paged cache, called by transformers.

    Args:
        module: The model's attention module, with its `layer_idx`.
        query: Queries [1, H, M, D].
        key: Keys of the new nodes [1, Hk, M, D].
        value: Values of the new nodes [1, Hk, M, Dv].
        attention_mask: Not used.
        scaling: Factor of the scores. None: D ** -0.5.
        sliding_window: Window of the layer, in tokens.
        softcap: Soft cap of the scores.
        s_aux: Attention sinks [H].
        packed: Context of the pass.

    Returns:
        Outputs [1, M, H, Dv], and None for the attention weights.

    Raises:
        OutsideTargetError: If `packed` is missing.
    """
    if packed is None:
        raise OutsideTargetError(
            f"a model with attention '{NAME}' was called outside its target; call HuggingFaceTarget.extend or .score, "
            "or give the model its own attention back with model.set_attn_implementation('sdpa') (until its engine's "
            "next step)"
        )
    layer: Any = module.layer_idx
    if isinstance(packed, Probe):
        width = max(key.shape[3], value.shape[3])
        packed.modules[layer] = module
        packed.layers[layer] = LayerShape(key.shape[1], width, width)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    slots = packed.slots
    keys, values = packed.keys[layer], packed.values[layer]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    if value_dim != key.shape[3]:  # latent attention: the narrower one is padded with zeros, which add nothing
        query, key, value = (pad(part, (0, keys.shape[3] - part.shape[3])) for part in (query, key, value))
    kv_stage(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, slots.slots)
    packed_query = query[0].transpose(0, 1)
    options: dict[str, Any] = {"scale": scale}  # defaults are not passed, to keep calls of every layer cheap
    if softcap:
        options["softcap"] = softcap
    if sliding_window:
        options["window"] = sliding_window
    if s_aux is not None:
        options["sinks"] = s_aux
    plan = packed.plan(packed_query, keys, sliding_window or 0)
    if plan is not None:
        options["plan"] = plan
    tree = (slots.page_table, slots.lengths, slots.offsets, slots.ancestors, slots.depth)
    out = tree_attention(packed_query, keys, values, *tree, **options)
    return out[..., :value_dim].unsqueeze(0), None


def is_served(config: Any) -> bool:
    """Returns whether a model with this configuration calls `attend`."""
    try:  # called in every pass; transformers' own attribute access takes some microseconds
        return bool(object.__getattribute__(config, "_attn_implementation_internal") == NAME)
    except AttributeError:
        return bool(config._attn_implementation == NAME)


def register() -> None:
    """Registers the attention function with transformers. Calling it twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)

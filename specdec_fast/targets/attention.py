"""The attention function that transformers models call in place of their own: paged, packed and tree-aware.

It is registered under two names in transformers' AttentionInterface. Under `NAME` it has no mask function, so models
build no mask. Under `PROBE_NAME` it records the calls and masks of a dry run. The context of a forward pass travels in
a keyword argument. Tests: tests/targets/test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from specdec_fast.interfaces import Slots
from specdec_fast.targets.chunked_attention import ancestors_and_depth_of_chunks
from specdec_fast.targets.recurrent_layers import MixerProbe, layer_of
from specdec_kernels import AttentionPlan, kv_stage, plan_for, tree_attention
from specdec_kernels.triton_shared.triton_backend import INTERPRETED

NAME = "specdec_paged"
PROBE_NAME = "specdec_probe"


@dataclass(slots=True)
class PackedContext:
    """The context of one forward pass, which every attention layer receives.

    Attributes:
        slots: Places of the staged nodes.
        keys: Keys by layer, [num_pages, page_size, heads, dim] each; None where a layer has no attention.
        values: Values by layer.
        windows: Window of each layer in tokens, 0 for none. None: the window that the model passes with each call.
        chunks: Chunk of each layer in tokens, 0 for none. None: no layer has chunks.
        longest: For what length the rotary frequencies of each node are pinned, int64 [M] (`RotaryPinning`).
        trees: Ancestor words and depths of layers with chunks, by size of the chunk.
        plans: Attention plans by kind of layer.
        hidden_states: Hidden states of this pass, by name.
    """

    slots: Slots
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    windows: Sequence[int] | None = None
    chunks: Sequence[int] | None = None
    longest: Tensor | None = None
    trees: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    plans: dict[Hashable, AttentionPlan | None] = field(default_factory=dict)
    hidden_states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """Position of each node, int64 [M]."""
        return self.slots.positions

    def tree(self, chunk: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns ancestor words and depths for layers with chunks of this size, 0 for none."""
        if not chunk:
            return self.slots.ancestors, self.slots.depth
        if chunk not in self.trees:
            self.trees[chunk] = ancestors_and_depth_of_chunks(self.slots, chunk)
        return self.trees[chunk]

    def plan(self, query: Tensor, keys: Tensor, window: int, ancestors: Tensor | None) -> AttentionPlan | None:
        """Returns the attention plan of GPU kernels. The first layer of a kind builds it, and the others reuse it.

        Compiled passes have no plans here: the operator that they call builds its own (`share_attention_plans`).
        """
        if (query.is_cpu and not INTERPRETED) or is_compiling():
            return None
        kind = (query.shape, query.dtype, keys.shape[1:], keys.dtype, window, ancestors is None)
        if kind not in self.plans:
            at = self.slots
            rest = (at.page_table, at.lengths, at.offsets, ancestors)
            self.plans[kind] = plan_for(query, keys, *rest, window=window)
        return self.plans[kind]


MaskFunction = Callable[..., Any]


@dataclass(slots=True)
class AttentionCall:
    """One call of the attention function in a dry run.

    Attributes:
        module: The model's attention module.
        layer: Its layer.
        query: Queries [1, H, M, D].
        key: Keys [1, Hk, M, D].
        value: Values [1, Hk, M, Dv].
        mask: The mask that the model passed.
        window: The window that the model passed, 0 for none.
        options: Further keyword arguments.
    """

    module: torch.nn.Module
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    window: int
    options: Mapping[str, Any]


@dataclass(slots=True)
class Probe:
    """Records the attention calls of a dry run, in which every attention returns zeros.

    Attributes:
        calls: The calls in order.
        masks: Masks that transformers' mask functions made, each with the rule that it stands for.
        num_tokens: Tokens of the dry run.
        positions: Their positions, int64 [M], for modules that would count them otherwise.
        device: Device of the model.
        mixers: Records the calls of recurrent layers.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)
    num_tokens: int = 1
    positions: Tensor | None = None
    device: torch.device | None = None
    mixers: MixerProbe = field(default_factory=MixerProbe)

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """The attention module of each layer."""
        return {call.layer: call.module for call in self.calls}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records masks of models with attention `PROBE_NAME`."""
        token = _active_probe.set(self)
        try:
            yield
        finally:
            _active_probe.reset(token)


_active_probe: ContextVar[Probe] = ContextVar("active_probe")


def _record_mask(*_: object, mask_function: MaskFunction, **__: object) -> Tensor:
    """The mask function of `PROBE_NAME`: keeps the rule of a mask, and returns a mask without content or memory."""
    probe = _active_probe.get()
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=probe.device)
    mask = mask.expand(1, 1, probe.num_tokens, probe.num_tokens)
    probe.masks.append((mask, mask_function))
    return mask


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
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of packed nodes over the paged cache, called by transformers.

    Args:
        module: The model's attention module, with its `layer_idx`.
        query: Queries [1, H, M, D].
        key: Keys of the new nodes [1, Hk, M, D].
        value: Values of the new nodes [1, Hk, M, Dv].
        attention_mask: Recorded in dry runs, else not used.
        scaling: Factor of the scores. None: D ** -0.5.
        sliding_window: Window of the layer, in tokens.
        softcap: Soft cap of the scores.
        s_aux: Attention sinks [H].
        packed: Context of the pass.
        **rest: Recorded in dry runs, else not used.

    Returns:
        Outputs [1, M, H, Dv], and None for the attention weights.

    Raises:
        OutsideTargetError: If `packed` is missing.
    """
    if packed is None:
        raise OutsideTargetError(
            f"a model with attention '{NAME}' was called outside its target; use its engine, or close that with "
            "engine.close(), which gives the model its own attention back"
        )
    layer: Any = layer_of(module)
    if isinstance(packed, Probe):
        packed.calls.append(AttentionCall(module, layer, query, key, value, attention_mask, sliding_window or 0, rest))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
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
    window = (sliding_window or 0) if packed.windows is None else packed.windows[layer]
    chunk = 0 if packed.chunks is None else packed.chunks[layer]
    ancestors, depth = packed.tree(chunk)
    if window or chunk:
        options["window"] = window or chunk
    if s_aux is not None:
        options["sinks"] = s_aux
    plan = packed.plan(packed_query, keys, window or chunk, ancestors)
    if plan is not None:
        options["plan"] = plan
    tree = (slots.page_table, slots.lengths, slots.offsets, ancestors, depth)
    out = tree_attention(packed_query, keys, values, *tree, **options)
    return out[..., :value_dim].unsqueeze(0), None


def is_served(config: Any) -> bool:
    """Returns whether a model with this configuration calls `attend`."""
    try:  # called in every pass; transformers' own attribute access takes some microseconds
        return bool(object.__getattribute__(config, "_attn_implementation_internal") == NAME)
    except AttributeError:
        return bool(config._attn_implementation == NAME)


def use_attention(model: Any, name: str) -> None:
    """Sets the attention of a model, and of layers whose configuration is a copy, as copied layers have.

    Args:
        model: A transformers model.
        name: `NAME`, `PROBE_NAME`, or a name that transformers knows.
    """
    model.set_attn_implementation(name)
    kind = type(model.config.get_text_config())
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if type(config) is kind and config._attn_implementation_internal != name:
            config._attn_implementation_internal = name


def register() -> None:
    """Registers the attention function with transformers. Calling it twice is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(PROBE_NAME, attend)
    AttentionMaskInterface.register(PROBE_NAME, _record_mask)

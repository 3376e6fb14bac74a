"""The functions that transformers' mixers call, each by the operator that replaces it.

A mixer function observes a call in a dry run, and runs it in a packed pass. Its arguments are those of transformers,
with one packed row of M nodes. Tests: tests/targets/test_recurrent_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from specdec_fast.cache.recurrent_states import Record, RecurrentStates
from specdec_fast.cache.shapes import StateShape, WindowShape
from specdec_kernels import tree_conv, tree_delta, tree_ssm

CONVOLUTION = "causal_conv1d_fn"
"""The name of the convolution in every Python module of transformers that has mixers."""
Names = Mapping[str, Any]
"""Names of the Python module of a mixer."""


class Pass(Protocol):
    """What a mixer function needs of a packed pass."""

    states: RecurrentStates
    advance: bool
    keeps_records: bool

    @property
    def tree(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rows, lengths, offsets and parents."""
        ...


@dataclass(frozen=True, slots=True)
class MixerFunction:
    """One function of transformers.

    Attributes:
        kind: The mixer that it belongs to, for messages.
        observe: Takes the names of the module and the arguments; returns the shape of a state and a result of zeros.
        run: Takes the names, the pass, the place of the state and the arguments; returns the result.
    """

    kind: str
    observe: Callable[..., tuple[WindowShape | StateShape, Any]]
    run: Callable[..., Any]


def _observe_convolution(
    _names: Names, hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any
) -> tuple[WindowShape, Tensor]:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"got a convolution with activation {activation!r}; expected None or 'silu'")
    return WindowShape(weight.shape[1] - 1, weight.shape[0]), hidden_states


def _convolve(
    _names: Names,
    now: Pass,
    place: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """The causal convolution of inputs [1, C, M]; returns [1, C, M]."""
    inputs = hidden_states[0].t().contiguous()
    window = now.states.windows[place]
    found = tree_conv(inputs, weight, bias, window, *now.tree, activation, now.advance)
    if now.keeps_records:
        now.states.inputs[place] = inputs
    return found.t()[None]


def _observe_delta(
    _names: Names, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[StateShape, tuple[Tensor, None]]:
    heads, value_dim = value.shape[2:]
    groups, key_dim = key.shape[2:]
    return StateShape(heads, key_dim, value_dim, groups, g[0, 0].numel()), (torch.zeros_like(value), None)


def _delta(
    names: Names,
    now: Pass,
    place: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule of [1, M, G, K]; returns [1, M, H, V], and None for the last state."""
    wide = now.states.states[place].dtype
    query, key = query[0].to(wide), key[0].to(wide)
    if use_qk_l2norm_in_kernel:
        query, key = names["l2norm"](query), names["l2norm"](key)
    query = query / query.shape[-1] ** 0.5
    gates = g[0].to(wide).contiguous()
    state = now.states.states[place]
    given = (query, key, value[0].to(wide).contiguous(), gates, beta[0].to(wide).contiguous())
    outputs, corrections = tree_delta(*given, state, *now.tree, now.advance)
    if now.keeps_records:
        now.states.records[place] = Record(key, corrections, gates)
    return outputs[None].to(value.dtype), None


def _observe_mamba2(
    _names: Names, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **named: Any
) -> tuple[StateShape, Any]:
    heads, width = hidden_states.shape[2:]
    groups, key_dim = B.shape[2:]
    zeros = torch.zeros_like(hidden_states, dtype=torch.float32)
    shape = StateShape(heads, key_dim, width, groups, heads)
    return shape, (zeros, None) if named.get("return_final_states") else zeros


def _mamba2(
    _names: Names,
    now: Pass,
    place: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """The state space recurrence of Mamba-2 for inputs [1, M, H, P]; returns the same shape."""
    state = now.states.states[place]
    wide = state.dtype
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).to(wide)
    inputs = hidden_states[0].to(wide)
    values, gates = inputs * steps[..., None], A.to(wide) * steps
    key, query = B[0].to(wide).contiguous(), C[0].to(wide).contiguous()
    outputs = tree_ssm(query, key, values, gates, state, *now.tree, None, now.advance)
    if now.keeps_records:
        now.states.records[place] = Record(key, values, gates)
    if D is not None:
        outputs = outputs + D.to(wide)[:, None] * inputs
    if z is not None:
        outputs = outputs * functional.silu(z[0])
    found = outputs[None]
    return (found, None) if return_final_states else found


def _observe_mamba1(
    _names: Names, hidden_states: Tensor, dt: Tensor, A: Tensor, *_: Any, **named: Any
) -> tuple[StateShape, Any]:
    zeros = torch.zeros_like(hidden_states)
    shape = StateShape(1, A.shape[1], A.shape[0], 1, A.shape[0])
    return shape, (zeros, None) if named.get("return_last_state") else zeros


def _mamba1(
    _names: Names,
    now: Pass,
    place: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """The selective scan of Mamba-1 for inputs [1, V, M]: its channels are the columns of one head."""
    state = now.states.states[place]
    wide = state.dtype
    steps = dt[0].t() if delta_bias is None else dt[0].t() + delta_bias.to(dt.dtype)
    steps = (functional.softplus(steps) if delta_softplus else steps).to(wide)
    inputs = hidden_states[0].t().to(wide)
    values, gates = (inputs * steps)[:, None].contiguous(), steps[:, None].contiguous()
    key, query = (each[0].t()[:, None].to(wide).contiguous() for each in (B, C))
    decay = A.t()[None].to(wide).contiguous()
    outputs = tree_ssm(query, key, values, gates, state, *now.tree, decay, now.advance)[:, 0]
    if now.keeps_records:
        now.states.records[place] = Record(key, values, gates, decay)
    if D is not None:
        outputs = outputs + inputs * D.to(wide)
    if z is not None:
        outputs = outputs * functional.silu(z[0].t())
    found = outputs.t()[None].to(hidden_states.dtype)
    return (found, None) if return_last_state else found


MIXER_FUNCTIONS = {
    CONVOLUTION: MixerFunction("a short convolution", _observe_convolution, _convolve),
    "torch_chunk_gated_delta_rule": MixerFunction("a gated delta rule", _observe_delta, _delta),
    "chunk_kimi_delta_attention": MixerFunction("Kimi delta attention", _observe_delta, _delta),
    "mamba2_chunk_scan": MixerFunction("Mamba-2", _observe_mamba2, _mamba2),
    "mamba_selective_scan": MixerFunction("Mamba-1", _observe_mamba1, _mamba1),
}
"""Functions of transformers' Python modules, by name."""

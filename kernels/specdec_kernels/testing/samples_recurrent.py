"""Sample calls of the operators of recurrent layers. Tests: tests/kernels/test_torch_ops.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .samples_attention import Call, Sample, Sizes, accepted_paths, int32, offsets, parents, random, size_of

_REACH = 4


def _batch(sizes: Sizes) -> tuple[Tensor, ...]:
    return torch.arange(sizes.rows).int(), int32([sizes.length] * sizes.rows), offsets(sizes)


def _path(sizes: Sizes) -> tuple[Tensor, ...]:
    return *_batch(sizes)[:2], accepted_paths(sizes)[0]


def _vectors(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, log_gate and state; a head's state is square."""
    nodes, wide = sizes.rows * sizes.nodes, sizes.width
    query, key = (random(sizes, nodes, sizes.kv_heads, wide, scale=wide**-0.5) for _ in range(2))
    value, gate = random(sizes, nodes, sizes.heads, wide), -random(sizes, nodes, sizes.heads).float().abs()
    state = random(sizes, sizes.rows, sizes.heads, wide, wide)
    return query, key, value, gate, state if state.dtype == torch.float64 else state.float()


def _work(sizes: Sizes, state: Tensor, *others: Tensor) -> dict[str, int]:
    return {"bytes": size_of(state, *others), "products": 3 * sizes.nodes * state.numel()}


def delta(sizes: Sizes) -> Call:
    """The gated delta rule over binary trees."""
    query, key, value, gate, state = _vectors(sizes)
    rates = random(sizes, len(value), sizes.heads).sigmoid()
    arguments = (query, key, value, gate, rates, state, *_batch(sizes), parents(sizes))
    return Call(arguments, {}, (state,), **_work(sizes, state, query, key, value, value))


def ssm(sizes: Sizes) -> Call:
    """The state space recurrence over binary trees."""
    query, key, value, gate, state = _vectors(sizes)
    arguments = (query, key, value, gate, state, *_batch(sizes), parents(sizes))
    return Call(arguments, {}, (state,), **_work(sizes, state, query, key, value, value))


def state_replay(sizes: Sizes) -> Call:
    """The paths to the last nodes, replayed."""
    _, key, value, gate, state = _vectors(sizes)
    arguments = (state, key, value, gate, *_path(sizes))
    return Call(arguments, {}, (state,), **_work(sizes, state, state), increments=0)


def _inputs(sizes: Sizes) -> tuple[Tensor, Tensor]:
    channels = sizes.heads * sizes.width
    return random(sizes, sizes.rows * sizes.nodes, channels), random(sizes, sizes.rows, _REACH - 1, channels)


def conv(sizes: Sizes) -> Call:
    """A convolution of four inputs over binary trees."""
    inputs, window = _inputs(sizes)
    weight, bias = random(sizes, inputs.shape[1], _REACH, scale=0.5), random(sizes, inputs.shape[1])
    arguments = (inputs, weight, bias, window, *_batch(sizes), parents(sizes))
    return Call(arguments, {"activation": "silu"}, (window,), bytes=size_of(inputs, inputs, weight, window))


def window_moves(sizes: Sizes) -> Call:
    """Windows moved to the last nodes."""
    inputs, window = _inputs(sizes)
    return Call((window, inputs, *_path(sizes)), {}, (window,), bytes=2 * size_of(window), increments=0)


def with_gates(make: Callable[[Sizes], Call], kind: str) -> Callable[[Sizes], Call]:
    """The same call with a gate for each channel of a key, or for each element of the state (`tree_ssm`)."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes)
        value, options = call.arguments[2], dict(call.options)
        gates = random(sizes, *value.shape).float().abs()  # states are square: as many key channels as columns
        if kind == "elements":
            options["decay"] = -random(sizes, *value.shape[1:], value.shape[2]).float().abs()
        else:
            gates = -gates
        return replace(call, arguments=(*call.arguments[:3], gates, *call.arguments[4:]), options=options)

    return made


def as_prompt(make: Callable[[Sizes], Call]) -> Callable[[Sizes], Call]:
    """The same call with chains whose states or windows advance."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes)
        (state,) = call.writes
        place = next(at for at, each in enumerate(call.arguments) if each is state)
        options = {**call.options, "advance": True}
        return replace(call, arguments=(*call.arguments[:-1], None), options=options, increments=place)

    return made


def single(make: Callable[[Sizes], Call]) -> Callable[[Sizes], Call]:
    """The same call with one node for each request, as without drafts."""
    return lambda sizes: make(replace(sizes, nodes=1))


_NAMES = ("rows", "nodes", "length", "heads", "width", "dtype")
_HEADS = (*_NAMES, "kv_heads")
RECURRENT_SAMPLES = {
    "tree_delta": Sample(delta, _HEADS),
    "tree_ssm": Sample(ssm, _HEADS),
    "tree_conv": Sample(conv, _NAMES),
    "state_commit": Sample(state_replay, _HEADS),
    "window_commit": Sample(window_moves, _NAMES),
}
RECURRENT_OPTIONS: dict[str, dict[str, Callable[[Sizes], Call]]] = {
    "tree_delta": {
        "gates of channels": with_gates(delta, "channels"),
        "prompt": as_prompt(delta),
        "one node": single(delta),
    },
    "tree_ssm": {
        "gates of channels": with_gates(ssm, "channels"),
        "gates of elements": with_gates(ssm, "elements"),
        "prompt": as_prompt(ssm),
        "one node": single(ssm),
    },
    "tree_conv": {"prompt": as_prompt(conv)},
}
"""Calls with options that the samples do not use, by operator and name."""

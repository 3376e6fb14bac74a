"""Rotary frequencies that depend on the length of a text, pinned for each request when it begins.

transformers chooses the frequencies of `longrope` and `dynamic` by the longest position of a pass. A text would then
depend on its neighbours, on rejected drafts, and on where its prompt is split. Here a request has one length for its
whole life: its prompt plus `max_new_tokens`, at most the target's `max_length`. Its frequencies follow from that:

- `longrope`: the short factors up to `original_max_position_embeddings`, and the long ones beyond.
- `dynamic`: the unscaled base up to `max_position_embeddings`, and the base of the target's `max_length` beyond.

Cached keys are rotated, so a request cannot change its frequencies midway. Tests: tests/targets/test_rotary_pinning.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("dynamic", "longrope")
Layers = str | None
"""A type of layer with frequencies of its own, or None if all layers share them."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """The two sets of frequencies of a rotary module.

    Attributes:
        switch: Longest text with the first set, in tokens.
        short: Returns the result of the module with the first set, from its input, positions and type of layer.
        long: The same with the second set. None: no text of the target is that long.
    """

    switch: int
    short: Callable[..., Any]
    long: Callable[..., Any] | None


def rotary_kinds(module: Any) -> dict[Layers, str]:
    """Returns the kinds of a rotary module whose frequencies depend on the text, by type of layer."""
    kinds = getattr(module, "rope_type", None)
    if not isinstance(module, torch.nn.Module) or not isinstance(kinds, (str, dict)):
        return {}
    by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layers: kind for layers, kind in by_layer.items() if kind in KINDS}


def context_limit(model: torch.nn.Module) -> int | None:
    """Returns the positions that a model supports: those of its configuration, times the factor of `dynamic`."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    factors = [
        float(_parameters(module, layers).get("factor") or 1.0) if kind == "dynamic" else 1.0
        for module in model.modules()
        for layers, kind in rotary_kinds(module).items()
    ]
    return int(positions * max(min(factors, default=1.0), 1.0))


def _parameters(module: Any, layers: Layers) -> dict[str, Any]:
    """The rotary parameters of a type of layer."""
    found: dict[str, Any] = module.config.rope_parameters
    return found if layers is None else found[layers]


class RotaryPinning:
    """The pinned frequencies of one target.

    A pass calls `start` with the lengths of its nodes, inside of what may be compiled, and `stop` behind it. Without a
    compiler, `running` does both.

    Args:
        model: The target's model. Its rotary modules run as they are, except in passes of targets.
        max_length: Longest text of the target.
        max_rows: Rows of the target.

    Attributes:
        switches: Longest texts of all sides but the last, in order, in tokens. Empty if all texts are on one side.
    """

    def __init__(self, model: torch.nn.Module, max_length: int, max_rows: int) -> None:
        self._max_length, device = max_length, getattr(model, "device", None)
        found = [(module, kinds) for module in model.modules() if (kinds := rotary_kinds(module))]
        made = [
            (module, {layers: _make_rule(module, layers, kind, max_length, device) for layers, kind in kinds.items()})
            for module, kinds in found
        ]
        self._rules = [(_take(module), rules) for module, rules in made]  # last: nothing fails any more
        each = [rule for _, rules in self._rules for rule in rules.values()]
        self.switches = sorted({rule.switch for rule in each if rule.long is not None})
        self._moves = any("dynamic" in rotary_kinds(shared.module).values() for shared, _ in self._rules)
        # a row that nobody began may become as long as the target allows
        self._longest = torch.full((max_rows,), max_length, dtype=torch.int64, device=device)

    def release(self) -> None:
        """Gives the modules back. Calling it twice is harmless."""
        rules, self._rules = self._rules, []
        for shared, _ in rules:
            _give(shared)

    def begin_row(self, row: int, longest: int) -> None:
        """Pins the frequencies of a row.

        Args:
            row: A row without tokens.
            longest: Tokens that its text may have at most.
        """
        if self.switches:
            self._longest[row] = longest

    def kind_of(self, longest: int) -> str:
        """Returns a name of the frequencies of a text, "" for those of short texts.

        Args:
            longest: Tokens that it may have at most.
        """
        beyond = sum(longest > switch for switch in self.switches)
        return f"longer than {self.switches[beyond - 1]}" if beyond else ""

    def why_not_as_generate(self, shortest: int, longest: int) -> str | None:
        """Returns why transformers' `generate` decodes texts with other frequencies, or None.

        Args:
            shortest: Tokens of the shortest prompt of a batch.
            longest: Tokens that the longest text may have.
        """
        beyond = [switch for switch in self.switches if longest > switch]
        if not beyond:
            return None
        if self.kind_of(shortest) == self.kind_of(longest) and not self._moves:
            return None
        return (
            f"up to {longest} tokens of prompt and text; expected at most {beyond[0]}, since transformers changes the "
            "rotary frequencies of longer texts while it decodes (pass a smaller max_new_tokens)"
        )

    def longest(self, rows: Tensor, offsets: Tensor, count: int) -> Tensor | None:
        """Returns for what length each node is pinned, int64 [count]. None: that makes no difference.

        Nothing waits for the device.

        Args:
            rows: Row of each request, int32 [B].
            offsets: First node of each request, int32 [B + 1].
            count: Nodes of the pass.
        """
        if not self.switches:
            return None
        at = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
        request = (torch.searchsorted(offsets, at, right=True) - 1).clamp(max=len(rows) - 1)
        return self._longest[rows.long()][request]

    def start(self, longest: Tensor | None) -> None:
        """Pins the frequencies of a pass, until `stop`.

        Args:
            longest: For what length each node is pinned, int64 [M]. None: for the target's longest text.
        """
        for shared, rules in self._rules:
            shared.rules = rules
            shared.longest = longest

    def stop(self) -> None:
        """Lets the modules run as they are."""
        for shared, _ in self._rules:
            shared.rules = shared.longest = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pins the frequencies of the target's longest text inside the context."""
        self.start(None)
        try:
            yield
        finally:
            self.stop()


def _rotate(rule: _Rule, longest: Tensor | None, x: Tensor, positions: Tensor, layers: Layers) -> Any:
    """What a rotary module returns, with pinned frequencies."""
    if rule.long is None:
        return rule.short(x, positions, layers)
    long = rule.long(x, positions, layers)
    if longest is None:
        return long
    short, is_long = rule.short(x, positions, layers), (longest > rule.switch).view(1, -1, 1)
    if isinstance(short, Tensor):
        return torch.where(is_long, long, short)
    return tuple(torch.where(is_long, second, first) for first, second in zip(short, long, strict=True))


def _make_rule(module: Any, layers: Layers, kind: str, max_length: int, device: Any) -> _Rule:
    """The rule of a module for a type of layer."""
    if kind == "longrope":
        switch = int(_parameters(module, layers)["original_max_position_embeddings"])
        short, long = _within(module, switch), _beyond(module, switch)
    else:
        switch = int(module.config.max_position_embeddings)
        short, long = (_frozen(module, layers, length, device) for length in (switch, max(max_length, switch)))
    return _Rule(switch, short, long if max_length > switch else None)


def _with_layers(forward: Callable[..., Any], x: Tensor, positions: Tensor, layers: Layers) -> Any:
    """Calls the forward of a rotary module, with a type of layer if there are any."""
    return forward(x, positions) if layers is None else forward(x, positions, layer_type=layers)


def _private_copy(module: Any) -> Any:
    """A copy with buffers of its own: those of the model count as weights, and a change would drop shared prefixes."""
    copied = copy.copy(module)
    copied.__dict__.pop("forward", None)
    copied._buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    return copied


def _within(module: Any, switch: int) -> Callable[..., Any]:
    """The module's own code for a text that ends before the switch."""
    own = _private_copy(module)
    return lambda x, positions, layers: _with_layers(own, x, positions.clamp(max=switch - 1), layers)


def _beyond(module: Any, switch: int) -> Callable[..., Any]:
    """The module's own code for a text that reaches behind the switch: one position more, which is left out."""
    own = _private_copy(module)

    def rotate(x: Tensor, positions: Tensor, layers: Layers) -> Any:
        found = _with_layers(own, x, torch.cat([positions, positions.new_full((1, 1), switch)], 1), layers)
        return found[:, :-1] if isinstance(found, Tensor) else tuple(each[:, :-1] for each in found)

    return rotate


def _frozen(module: Any, layers: Layers, length: int, device: Any) -> Callable[..., Any]:
    """A copy of the module with the frequencies of texts of a length, which it never changes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS["dynamic"](module.config, seq_len=length, layer_type=layers)
    fixed, kinds, prefix = _private_copy(module), module.rope_type, "" if layers is None else f"{layers}_"
    fixed._buffers[f"{prefix}inv_freq"] = frequencies.to(device)
    fixed.rope_type = {**kinds, layers: "default"} if isinstance(kinds, dict) else "default"
    setattr(fixed, f"{prefix}attention_scaling", scaling)
    return lambda x, positions, layers: _with_layers(fixed, x, positions, layers)


# -- rotary modules of models, which several targets may share --------------------------------------------------------


class _Shared:
    """A rotary module that targets use.

    Attributes:
        module: The module.
        own: The forward of its own that the module had, or None.
        users: Number of targets.
        rules: Rules of the target whose pass runs now, by type of layer. None: no pass runs.
        longest: For what length each node of this pass is pinned.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.own, self.users = module, module.__dict__.get("forward"), 0
        self.rules: dict[Layers, _Rule] | None = None
        self.longest: Tensor | None = None


_lock = threading.Lock()
_known: dict[int, _Shared] = {}
"""By the id of a module. Passes of one model run one after the other (`modules_in_use`)."""


def _take(module: Any) -> _Shared:
    """Lets passes of targets decide what a module returns, or counts one more user."""
    with _lock:
        if id(module) not in _known:
            shared = _known[id(module)] = _Shared(module)
            module.__dict__["forward"] = _leading(shared, shared.own or module.forward)  # shadows the class's
        _known[id(module)].users += 1
        return _known[id(module)]


def _leading(shared: _Shared, own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that pins frequencies in passes of targets."""

    def forward(x: Tensor, position_ids: Tensor, layer_type: Layers = None) -> Any:
        if shared.rules is None or layer_type not in shared.rules:
            return _with_layers(own, x, position_ids, layer_type)
        return _rotate(shared.rules[layer_type], shared.longest, x, position_ids, layer_type)

    return forward


def _give(shared: _Shared) -> None:
    """Counts one user less. The last one restores the module."""
    with _lock:
        shared.users -= 1
        if shared.users:
            return
        del _known[id(shared.module)]
        if shared.own is None:
            shared.module.__dict__.pop("forward", None)
        else:
            shared.module.__dict__["forward"] = shared.own

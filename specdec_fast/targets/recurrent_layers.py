"""Recurrent layers of transformers models over packed trees.

Every mixer of transformers calls a convolution and a recurrence of its Python module by name. While a target is open,
these names lead here. Inside of a packed pass they run the project's operators over `RecurrentStates`; anywhere else
they are transformers' own. Mixers are known by the functions that they call, not by the names of models.
Tests: tests/targets/test_recurrent_layers.py.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.recurrent_states import RecurrentStates
from specdec_fast.cache.shapes import StateShape, WindowShape
from specdec_fast.targets.linear_layers import BatchInvariantWeight
from specdec_fast.targets.mixer_calls import CONVOLUTION, MIXER_FUNCTIONS, MixerFunction

KINDS = tuple(sorted(each.kind for each in MIXER_FUNCTIONS.values()))
"""Kinds of mixers that are known, in words."""
Place = tuple[int, str, int]
"""A mixer, the name of a function, and which of its calls."""


@dataclass(slots=True)
class MixerProbe:
    """Records the shapes of states in a dry run, in which convolutions are skipped and recurrences return zeros.

    Attributes:
        shapes: Window or state of each place.
        mixer: The mixer that runs now.
        calls: Calls of this mixer so far, by name.
        layer: Layer of the attention that runs now, if layers share its module.
    """

    shapes: dict[Place, WindowShape | StateShape] = field(default_factory=dict)
    mixer: int = -1
    calls: Counter[str] = field(default_factory=Counter)
    layer: int | None = None


@dataclass(slots=True)
class MixerPass:
    """One packed pass.

    Attributes:
        states: States of all rows.
        places: Index of each place in `states`.
        rows: Row of each request, int32 [B].
        lengths: Committed tokens of each request before this pass, int32 [B].
        offsets: First node of each request, int32 [B + 1].
        parents: Parent of each node by its index in its tree, int32 [M]; None for chains.
        advance: Commit the nodes at once.
        keeps_records: Whether nodes leave records: they are committed later, or may be rolled back.
        hidden_states: Hidden states of this pass, by name, for models that hand no context on to their layers.
        mixer: The mixer that runs now.
        calls: Calls of this mixer so far, by name.
        layer: Layer of the attention that runs now, if layers share its module.
    """

    states: RecurrentStates
    places: Mapping[Place, int]
    rows: Tensor
    lengths: Tensor
    offsets: Tensor
    parents: Tensor | None
    advance: bool
    keeps_records: bool = True
    hidden_states: dict[str, Tensor] = field(default_factory=dict)
    mixer: int = -1
    calls: Counter[str] = field(default_factory=Counter)
    layer: int | None = None

    @property
    def tree(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rows, lengths, offsets and parents, as operators take them."""
        return self.rows, self.lengths, self.offsets, self.parents

    def end(self) -> None:
        """Keeps the records of nodes that were committed at once, if they may be rolled back."""
        if self.advance:
            self.states.end_advance(self.rows, self.lengths, self.offsets)


_running: ContextVar[MixerPass | MixerProbe | None] = ContextVar("mixer_pass", default=None)


@contextmanager
def running(now: MixerPass | MixerProbe | None) -> Iterator[None]:
    """Leads the mixers' functions to a pass or a dry run inside the context. None changes nothing."""
    if now is None:
        yield
        return
    token = _running.set(now)
    try:
        yield
    finally:
        _running.reset(token)


def hidden_states_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns where a hook stores hidden states.

    Args:
        given: Keyword arguments of a module. Models without attention hand no context on.
    """
    if "packed" in given:
        found: dict[str, Tensor] = given["packed"].hidden_states
        return found
    now = _running.get()
    return now.hidden_states if isinstance(now, MixerPass) else {}


def with_equal_columns(mixers: list[torch.nn.Module]) -> None:
    """Makes products of steps, which Mamba-1 writes out, give each token the bits that it has alone.

    Args:
        mixers: Mixers of a model on a CPU. Their weights change their type.
    """
    for mixer in mixers:
        weight = getattr(getattr(mixer, "dt_proj", None), "weight", None)
        if "mamba_selective_scan" in functions_of(mixer) and type(weight) is torch.nn.Parameter:
            weight.__class__ = BatchInvariantWeight


def layer_of(module: Any) -> int | None:
    """Returns the layer of an attention module. Layers of Zamba share one, and pass their number with each call."""
    own: int | None = module.layer_idx
    if own is not None and own >= 0:
        return own
    now = _running.get()
    return None if now is None else now.layer


def find_mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the mixers of a model: modules with a causal convolution whose Python module has known functions."""
    return [module for module in model.modules() if _convolution_of(module) is not None and functions_of(module)]


def why_not_served(model: torch.nn.Module) -> str | None:
    """Returns why recurrent layers of a model cannot be served, or None. Models without any are served."""
    for name, module in model.named_modules():
        if _convolution_of(module) is not None and not functions_of(module):
            return (
                f"got {type(module).__name__} at {name!r}, which calls no function of a mixer that is known here; "
                f"expected one of these kinds: {', '.join(KINDS)}"
            )
    return None


def _convolution_of(module: torch.nn.Module) -> torch.nn.Conv1d | None:
    """The depthwise convolution of a mixer, or None."""
    for each in module.children():
        if isinstance(each, torch.nn.Conv1d) and each.groups == each.in_channels == each.out_channels:
            return each
    return None


def functions_of(mixer: torch.nn.Module) -> dict[str, MixerFunction]:
    """Returns the functions of a mixer's Python module that lead here, by name. Without a convolution: none."""
    names = vars(sys.modules[type(mixer).__module__])
    found = {name: function for name, function in MIXER_FUNCTIONS.items() if callable(names.get(name))}
    return found if CONVOLUTION in found else {}


class _Functions:
    """Replaces functions of Python modules, as long as somebody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        self._own: dict[tuple[str, str], Callable[..., Any]] = {}

    def take(self, module_name: str) -> None:
        """Replaces the functions of a module, or counts one more user."""
        with self._lock:
            self._users[module_name] += 1
            if self._users[module_name] > 1:
                return
            names = vars(sys.modules[module_name])
            for name, function in MIXER_FUNCTIONS.items():
                if callable(names.get(name)):
                    self._own[module_name, name] = names[name]
                    names[name] = _leading(names[name], name, function, names)

    def give(self, module_name: str) -> None:
        """Counts one user less. The last one restores the functions."""
        with self._lock:
            self._users[module_name] -= 1
            if self._users[module_name]:
                return
            for name in MIXER_FUNCTIONS:
                if (module_name, name) in self._own:
                    setattr(sys.modules[module_name], name, self._own.pop((module_name, name)))


_functions = _Functions()


def _leading(
    own: Callable[..., Any], name: str, function: MixerFunction, names: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function that calls the operators inside of a pass of a mixer, and transformers' own anywhere else."""

    @wraps(own)
    def call(*args: Any, **named: Any) -> Any:
        now = _running.get()
        if now is None or now.mixer < 0:
            return own(*args, **named)
        place = (now.mixer, name, now.calls[name])
        now.calls[name] += 1
        if isinstance(now, MixerProbe):
            now.shapes[place], result = function.observe(names, *args, **named)
            return result
        return function.run(names, now, now.places[place], *args, **named)

    return call


class MixerUse:
    """One target's use of the mixers of a model, until `release`.

    Args:
        model: The model.
        mixers: Its mixers, in order.
    """

    def __init__(self, model: torch.nn.Module, mixers: list[torch.nn.Module]) -> None:
        self._modules = sorted({type(each).__module__ for each in mixers})
        for name in self._modules:
            _functions.take(name)
        self._hooks = []
        for at, mixer in enumerate(mixers):
            self._hooks.append(mixer.register_forward_pre_hook(_entering(at)))
            self._hooks.append(mixer.register_forward_hook(_leave, always_call=True))
        for module in model.modules() if mixers else ():
            if getattr(module, "layer_idx", 0) in (None, -1):
                self._hooks.append(module.register_forward_pre_hook(_note_layer, with_kwargs=True))

    def release(self) -> None:
        """Gives the Python modules and the mixers back. Calling it twice is harmless."""
        modules, self._modules = self._modules, []
        for name in modules:
            _functions.give(name)
        for hook in self._hooks:
            hook.remove()


def _entering(at: int) -> Callable[..., None]:
    def enter(_module: torch.nn.Module, _args: Any) -> None:
        now = _running.get()
        if now is not None:
            now.mixer = at
            now.calls.clear()

    return enter


def _note_layer(_module: torch.nn.Module, _args: Any, named: dict[str, Any]) -> None:
    now = _running.get()
    if now is not None:
        now.layer = named.get("layer_idx")


def _leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
    now = _running.get()
    if now is not None:
        now.mixer = -1

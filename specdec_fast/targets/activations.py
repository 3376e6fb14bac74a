"""Activations whose rows have the same bits alone and in a batch, on a CPU.

torch computes most elements with vector instructions, and the last ones of a loop one at a time, with other rounding.
Where a loop ends depends on the number of rows and of threads. Here loops end at whole vectors only.
Tests: tests/targets/test_activations.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BatchInvariantActivation", "call_by_whole_vectors", "is_activation", "with_batch_invariant_activations"]

VECTORS = 128
"""Bytes of the longest step of torch's loops: two vectors of AVX-512."""
SERIAL = 2**14
"""Elements that torch computes in one thread, whatever the function."""
GRAINS = (2**15, 2**11)
"""Elements of which a thread gets at least one lot. Functions that share all elements equally are treated apart."""

_MODULES = (
    torch.nn.CELU, torch.nn.ELU, torch.nn.GELU, torch.nn.Hardswish, torch.nn.LogSigmoid, torch.nn.Mish, torch.nn.SELU,
    torch.nn.SiLU, torch.nn.Sigmoid, torch.nn.Softplus, torch.nn.Tanh,
)  # fmt: skip
_EXACT = ("LinearActivation", "ReLUSquaredActivation", "ReLU", "ReLU6", "LeakyReLU", "PReLU")
"""Activations of transformers without a function whose rounding could differ."""
_FUNCTIONS = ("sigmoid", "silu", "gelu", "mish", "softplus", "log_sigmoid", "elu", "hardswish")
"""Operators of torch with one tensor, by element, whose rounding differs. `selu` and `celu` call `elu`."""


@lru_cache(maxsize=4096)
def whole_part(count: int, step: int, threads: int) -> int:
    """Returns how many of `count` elements torch computes at once with all loops ending at multiples of `step`.

    Args:
        count: Elements side by side, a multiple of `step`.
        step: Elements of a step of a loop.
        threads: Threads of torch.
    """
    while count > SERIAL and threads > 1:
        shares = {threads, *(min(threads, -(-count // grain)) for grain in GRAINS)}
        if all(-(-count // share) % step == 0 for share in shares):
            break
        count -= step
    return count


def call_by_whole_vectors(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Calls a function that computes each element from itself alone. An element's bits depend on no other.

    Args:
        function: The function.
        input: Its first argument.
        *args: Further arguments.
        **kwargs: Named arguments.

    Returns:
        Its result, of the shape of `input`.
    """
    count, step = input.numel(), VECTORS // input.element_size()
    padding = -count % step
    # torch has other code for some functions of tensors with gaps, which no single row has
    whole = not padding and input.is_contiguous()
    if whole and (count <= SERIAL or whole_part(count, step, torch.get_num_threads()) == count):
        return function(input, *args, **kwargs)
    flat = input.contiguous().view(-1)
    if padding:
        flat = functional.pad(flat, (0, padding))
    parts, size = [], flat.shape[0]
    while size:
        part = whole_part(size, step, torch.get_num_threads())
        parts.append(function(flat[flat.shape[0] - size :][:part], *args, **kwargs))
        size -= part
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[:count].view(input.shape)


class BatchInvariantActivation(torch.nn.Module):
    """What activation modules are in addition while a target uses their model (`call_by_whole_vectors`).

    On other devices and in compiled code they are what they were.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Computes the activation of each element."""
        if not input.is_cpu or torch.compiler.is_compiling():
            return super().forward(input)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):  # once is enough
            return call_by_whole_vectors(super().forward, input)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files get the module's own type, which other programs know."""
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (type(self).__bases__[1],), *reduced[2:]


@cache
def _transcendental() -> frozenset[type]:
    """Types of activation modules that compute each element by itself, with a function that rounds."""
    from transformers.activations import ACT2CLS

    kinds: set[Any] = {each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()}
    return frozenset({each for each in kinds if each.__name__ not in _EXACT} | set(_MODULES))


@cache
def _batch_invariant_type(kind: Any) -> Any:
    """The subclass of an activation's type whose rows have equal bits."""
    return type(
        f"BatchInvariant{kind.__name__}",
        (BatchInvariantActivation, kind),
        {"__doc__": BatchInvariantActivation.__doc__},
    )


def is_activation(module: torch.nn.Module) -> bool:
    """Returns whether `with_batch_invariant_activations` changes the type of a module, or has changed it."""
    return isinstance(module, BatchInvariantActivation) or type(module) in _transcendental()


_KEY = "TESTING_ONLY_GenericMode"
"""A key for modes, which torch itself leaves free."""
_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
_replacements, _fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
_lock = threading.Lock()


def _including_key() -> Any:
    """Registers replacements of `_FUNCTIONS` under a dispatch key, once. They serve threads that include this key.

    Other operators cost the same with the key as without it. A `TorchFunctionMode` would call Python for each function
    of a pass.

    Returns:
        The key.
    """
    with _lock:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_FUNCTIONS[0]}", _KEY):
            _fallback.fallback(torch.library.fallthrough_kernel, _KEY)
            for name in reversed(_FUNCTIONS):
                _replacements.impl(name, _by_whole_vectors(getattr(torch.ops.aten, name).default), _KEY)
    return torch._C._dispatch_key_parse(_KEY)


def _by_whole_vectors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The replacement of a function."""

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if not input.is_cpu or not input.is_floating_point():
                return function(input, *args, **kwargs)
            return call_by_whole_vectors(function, input, *args, **kwargs)

    return run


def with_batch_invariant_activations(model: torch.nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the activations of a model batch-invariant: its modules in place, and those that it calls as functions.

    Modules of users' own types, and those that work in place, stay. Functions of models with experts stay too: torch
    multiplies all tokens of an expert at once, and rows differ anyway.

    Args:
        model: A transformers model on a CPU.
        forward: Its packed pass.

    Returns:
        The same pass.
    """
    for module in model.modules():
        kind: Any = type(module)
        if kind in _transcendental() and not getattr(module, "inplace", False):
            module.__class__ = _batch_invariant_type(kind)
    others = [each for each in model.modules() if not isinstance(each, torch.nn.Conv1d)]
    if any(_is_stack(parameter) for each in others for parameter in each.parameters(recurse=False)):
        return forward
    key = _including_key()

    def run(**arguments: Any) -> Tensor:
        with torch._C._IncludeDispatchKeyGuard(key):
            return forward(**arguments)

    return run


def _is_stack(parameter: Tensor) -> bool:
    """Whether a parameter is a stack of matrices, as experts have. Kimi's decay [1, 1, H, 1] is a vector."""
    return sum(size > 1 for size in parameter.shape) > 2

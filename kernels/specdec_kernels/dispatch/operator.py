"""Operators with several backends: selection and explanations.

An `Op` owns a plain PyTorch reference and an ordered list of faster backends. The first backend whose `why_not` returns
None serves the call. The choice is cached per signature, so a later call costs one dictionary look-up.
Tests: tests/kernels/test_dispatch.py, tests/kernels/test_torch_ops.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from inspect import signature as parameters_of
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from ..overlay import Overlay, check_overlay
from ..unknown_names import hint
from . import debug_mode
from .argument_types import explain_wrong_type
from .backend_request import FROM_ENVIRONMENT, REQUEST, BackendRequest
from .devices import find_first_tensor
from .registry import OPS, unknown_operator
from .workspace import copy_results, total_bytes

REFERENCE = "reference"


_MEMORY_DOC = """
    Caller-owned memory: `out=`, a contiguous tensor or a tuple of them as returned, receives the results. `workspace=`,
    uint8 [`workspace_size(...)`], is scratch memory. With both, kernels on a GPU allocate nothing.
    """
_OVERLAY_DOC = """
    Logits processors: `overlay=` takes an `Overlay` that `process_logits_overlay` made for {0}. Kernels on a GPU apply
    it when they load logits; other backends receive a processed copy of the logits in float32.
    """
_MEMORY_ARGUMENTS = frozenset(("out", "workspace", "overlay"))


class UnsupportedError(ValueError):
    """The requested backend cannot serve this call. The message lists the reason of every backend."""


class FallbackWarning(UserWarning):
    """The slow reference serves a call because no faster backend can."""


def _no_reason(*args: Any, **kwargs: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Attributes:
        name: Such as "cpu", "cuda", "triton", or "triton_sequence" for another form of the latter.
        load: Returns the callable, which has the parameters of the operator. It is imported on first use.
        why_not: Takes the arguments of a call. Returns one sentence that says why this backend cannot serve it, or
            None. It reads shapes, dtypes and devices only, because its result is cached per signature (see `Op`).
        missing: Returns the reason that needs no arguments, such as an extension that is not built, or None.
        graph_devices: Device types on which torch.compile may put this backend into a graph, with the name under which
            it is requested there. Its callable only calls a registered operator with a fake kernel.
        not_worth: Like `why_not`, but only excludes the backend from automatic selection. An explicit request still
            selects it.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    why_not: Callable[..., str | None] = _no_reason
    missing: Callable[[], str | None] = _no_reason
    graph_devices: Mapping[str, str] = field(default_factory=dict)
    not_worth: Callable[..., str | None] = _no_reason


def lazy_import(package: str, place: str) -> Callable[[], Callable[..., Any]]:
    """Makes the `load` of a backend: it imports a function of the operator's package on first use.

    Args:
        package: `__name__` of the package.
        place: "module:function".

    Returns:
        A function without arguments that returns the imported function.
    """
    module, _, name = place.partition(":")
    return lambda: getattr(import_module(f".{module}", package), name)


class Explanation(NamedTuple):
    """One row of `explain`.

    Attributes:
        op: Name of the operator.
        backend: Name of the backend.
        chosen: Whether the backend serves the call.
        reason: Why it cannot serve the call, or None.
    """

    op: str
    backend: str
    chosen: bool
    reason: str | None


def first_tensor_key(*args: Any, **kwargs: Any) -> Hashable:
    """Computes the default signature of a call: device and dtype of its first tensor.

    Args:
        *args: Positional arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        The signature. Without positional arguments it contains name, device and dtype of every tensor.
    """
    if not args:  # the order of keyword arguments carries no meaning
        return tuple((name, t.device, t.dtype) for name, t in sorted(kwargs.items()) if isinstance(t, torch.Tensor))
    first = args[0]
    if not isinstance(first, torch.Tensor):
        first = find_first_tensor((*args, *kwargs.values()))
        if first is None:  # the backend raises with its own message
            return None
    return first.dtype if first.is_cpu else (first.device, first.dtype)  # on the CPU every microsecond counts


class Op:
    """Callable operator with a reference and faster backends.

    The reference is the last resort. Automatic selection warns once per reason when it selects the reference.

    Args:
        name: Unique name.
        reference: Plain PyTorch implementation, for any device.
        backends: Faster implementations in order of preference.
        key: Takes the arguments of a call. Returns everything that a `why_not` of these backends reads, hashable,
            device type and dtypes first.
        direct_backends: Backends that take `out` and `workspace` themselves. With a value here the operator takes
            `out` (a tensor, or a tuple as returned) and `workspace` (uint8, `workspace_size` bytes). Results of other
            backends are copied to `out`.
        check_data: Raises for data that the reference refuses. `debug_mode` calls it with the arguments of a launch,
            integers copied to the host.
        overlaid: Name of the argument, logits or a distribution, to which `overlay` applies. Triton launches take the
            overlay; other backends receive processed logits.

    Attributes:
        last_backend: Backend that served the latest call in this process. A diagnostic for tests and benchmarks.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        backends: list[Backend],
        key: Callable[..., Hashable] = first_tensor_key,
        direct_backends: tuple[str, ...] | None = None,
        check_data: Callable[..., Any] | None = None,
        overlaid: str | None = None,
    ) -> None:
        if name in OPS:
            raise ValueError(f"operator {name!r} is registered twice")
        self.name = name
        self.reference = reference
        self.backends = [*backends, Backend(REFERENCE, lambda: reference)]
        self.last_backend: str | None = None
        self._key = key
        self._choices: dict[Hashable, tuple[str, Callable[..., Any]]] = {}
        self._graph_calls: dict[str, Callable[..., Any]] = {}
        self._warned: set[str] = set()
        self.__name__ = self.__qualname__ = name
        self._direct_backends, self._check_data, self._overlaid = direct_backends, check_data, overlaid
        self._takes_memory = direct_backends is not None or overlaid is not None
        more = (_MEMORY_DOC if direct_backends is not None else "") + (
            _OVERLAY_DOC.format(f"`{overlaid}`") if overlaid is not None else ""
        )
        self.__doc__ = f"{reference.__doc__}{more}" if reference.__doc__ else None
        self.__wrapped__ = reference  # inspect.signature and help() show the reference's parameters
        OPS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operator on the selected backend. Parameters and results are those of the reference."""
        if is_compiling():
            return self._call_traced(*args, **kwargs)
        try:
            if self._takes_memory and not _MEMORY_ARGUMENTS.isdisjoint(kwargs):
                return self._call_with_memory(*args, **kwargs)
            self.last_backend, run = self._select_backend(args, kwargs)
            return run(*args, **kwargs)
        except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError) as error:
            # torch 2.15 raises RuntimeError for every C++ exception
            if isinstance(error, RuntimeError) and str(error).startswith(self.name):
                raise ValueError(str(error)) from None
            own = {name: value for name, value in kwargs.items() if name not in _MEMORY_ARGUMENTS}
            words = explain_wrong_type(self.name, self.reference, args, own)
            if words is not None and not isinstance(error, torch.OutOfMemoryError):
                raise ValueError(words) from error
            raise

    def with_data_check(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a launch of this operator. In `debug_mode` it checks its data first."""
        return (
            debug_mode.with_data_check(launch, self._check_data)
            if debug_mode.ENABLED and self._check_data is not None
            else launch
        )

    def _select_backend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Callable[..., Any]]:
        """Returns (name, callable) of the backend that serves a call, from the cache if it is there."""
        request = REQUEST.get()
        signature = self._key(*args, **kwargs) if request is None else (request, self._key(*args, **kwargs))
        choice = self._choices.get(signature)
        if choice is None:
            choice = self._choices[signature] = self._find_backend(request, args, kwargs)
        return choice

    def _call_with_memory(
        self, *args: Any, out: Any = None, workspace: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Runs a call with caller-owned memory or with an overlay."""
        if ("overlay" in kwargs and self._overlaid is None) or (
            workspace is not None and self._direct_backends is None
        ):
            name = "overlay" if "overlay" in kwargs and self._overlaid is None else "workspace"
            raise TypeError(f"{self.name}() takes no argument {name!r}")
        overlay = kwargs.pop("overlay", None)
        if out is None and workspace is None and overlay is None:
            return self(*args, **kwargs)
        self.last_backend, run = self._select_backend(args, kwargs)
        if overlay is not None and self.last_backend == "triton":
            kwargs["overlay"] = overlay
        elif overlay is not None:
            args, kwargs = self._apply_overlay(overlay, args, kwargs)
        if self.last_backend in (self._direct_backends or ()):
            memory = {"workspace": workspace} if hasattr(run, "scratch") else {}
            return run(*args, out=out, **memory, **kwargs)
        return copy_results(self.name, out, run(*args, **kwargs) if "overlay" in kwargs else self(*args, **kwargs))

    @cached_property
    def _overlaid_place(self) -> int:
        return list(parameters_of(self.reference).parameters).index(str(self._overlaid))

    def _apply_overlay(
        self, overlay: Overlay, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with a processed float32 copy of its logits."""
        name, place = str(self._overlaid), self._overlaid_place
        known = args[place] if place < len(args) else kwargs[name]
        logits, dist = (known[0], known) if isinstance(known, (tuple, list)) else (known, None)
        check_overlay(self.name, overlay, logits)
        processed = overlay.apply(logits)
        value = processed if dist is None else (processed, *dist[1:])
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def workspace_size(self, *args: Any, **kwargs: Any) -> int:
        """Returns the bytes of `workspace=` with which this call allocates no scratch; 0 if its backend needs none."""
        kwargs.pop("overlay", None)
        scratch = getattr(self._find_backend(REQUEST.get(), args, kwargs, quiet=True)[1], "scratch", None)
        return total_bytes(scratch(*args, **kwargs)) if scratch is not None else 0

    def __repr__(self) -> str:
        return f"<Op {self.name}: {' > '.join(b.name for b in self.backends)}>"

    def choose_backend(self, *args: Any, **kwargs: Any) -> str:
        """Returns the name of the backend that would serve this call.

        Raises:
            UnsupportedError: If the requested backend cannot serve it.
        """
        return self._find_backend(REQUEST.get(), args, kwargs, quiet=True)[0]

    def bind_backend(self, *args: Any, **kwargs: Any) -> tuple[str, Callable[..., Any]]:
        """Returns (name, callable) of the backend that would serve this call.

        Callers that make the same call very often keep the callable.

        Raises:
            UnsupportedError: If the requested backend cannot serve it.
        """
        return self._find_backend(REQUEST.get(), args, kwargs, quiet=True)

    def explain(self, *args: Any, **kwargs: Any) -> list[Explanation]:
        """Returns one row per backend in order of preference; with arguments, for exactly that call."""
        request = REQUEST.get()
        wanted = request.name_for(self.name) if request else None
        rows, taken = [], False
        for backend in self.backends:
            reason = self._reason_against(backend, args, kwargs) if args or kwargs else backend.missing()
            if reason is None and wanted is None and (args or kwargs):
                reason = backend.not_worth(*args, **kwargs)
            certain = bool(args or kwargs) or wanted is not None or backend.not_worth is _no_reason
            chosen = not taken and reason is None and certain and wanted in (None, backend.name)
            taken = taken or chosen
            rows.append(Explanation(self.name, backend.name, chosen, reason))
        return rows

    def clear_choices(self) -> None:
        """Drops cached choices, for example after an extension was built."""
        self._choices.clear()
        self._graph_calls.clear()
        self._warned.clear()

    @staticmethod
    def _reason_against(backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return backend.missing() or backend.why_not(*args, **kwargs)

    def _find_backend(
        self, request: BackendRequest | None, args: tuple[Any, ...], kwargs: dict[str, Any], quiet: bool = False
    ) -> tuple[str, Callable[..., Any]]:
        wanted = request.name_for(self.name) if request is not None else None
        reasons: list[str] = []
        for backend in self.backends:
            if wanted is not None and backend.name != wanted:
                continue
            reason = self._reason_against(backend, args, kwargs)
            if reason is None and wanted is None:
                reason = backend.not_worth(*args, **kwargs)
            if reason is None:
                if backend.name == REFERENCE and wanted is None and reasons and not quiet:
                    self._warn_fallback("; ".join(reasons))
                run = backend.load()
                run = debug_mode.with_logits_check(self.name, self.reference, run) if debug_mode.ENABLED else run
                return backend.name, self.with_data_check(run) if backend.name.startswith(("cuda", "triton")) else run
            reasons.append(f"{backend.name}: {reason}")
        verdicts = [
            f"{b.name}: {self._reason_against(b, args, kwargs) or 'can serve this call'}" for b in self.backends
        ]
        known = any(b.name == wanted for b in self.backends)
        near = hint(wanted, {b.name for op in OPS.values() for b in op.backends})
        problem = "cannot serve this call" if known else f"is not a backend of this operator{near}"
        origin = " (from SPECDEC_BACKEND)" if request is FROM_ENVIRONMENT else ""
        raise UnsupportedError(
            f"{self.name}: backend {wanted!r}{origin} {problem}. Backends:\n  " + "\n  ".join(verdicts)
        )

    def _call_traced(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call under torch.compile, which selects the backend once, while tracing."""
        overlay = kwargs.pop("overlay", None) if self._overlaid is not None else None
        if overlay is not None:
            args, kwargs = self._apply_overlay(overlay, args, kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        run = self._graph_calls[_pick_graph_backend(self.name, tensors[0].device.type)]
        if self._direct_backends is None:
            return run(*args, **kwargs)
        kwargs.pop("workspace", None)
        return copy_results(self.name, kwargs.pop("out", None), run(*args, **kwargs))

    def _warn_fallback(self, reasons: str) -> None:
        if reasons not in self._warned:
            self._warned.add(reasons)
            warnings.warn(f"{self.name} runs on its slow PyTorch reference ({reasons})", FallbackWarning, stacklevel=5)


def _pick_graph_backend(name: str, device: str) -> str:
    """Stores the callable in `op._graph_calls` and returns its key. Raises UnsupportedError for an unmet request."""
    op, request = OPS[name], REQUEST.get()
    wanted = request.name_for(name) if request is not None else None
    key = device if wanted is None else f"{device}, {wanted}"
    if key not in op._graph_calls:
        fits = [b for b in op.backends if device in b.graph_devices and b.missing() is None]
        fits = [b for b in fits if wanted in (None, b.graph_devices[device])]
        if not fits and wanted not in (None, REFERENCE):
            raise UnsupportedError(f"{name}: backend {wanted!r} cannot serve compiled code on {device}")
        op._graph_calls[key] = fits[0].load() if fits else op.reference
    return key


# This is torch.compiler.assume_constant_result without an import of the compiler: the function runs while tracing.
_pick_graph_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(op: Op | str | None = None, *args: Any, **kwargs: Any) -> str:
    """Returns a table of operators and backends: which one is chosen, and why the others are not.

    Args:
        op: An operator or its name; None for all operators.
        *args: Arguments of a call to explain exactly.
        **kwargs: Keyword arguments of that call.

    Returns:
        The table, one line per operator and backend.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(op, str) and op not in OPS:
        raise ValueError(unknown_operator("explain", op))
    chosen = [OPS[op]] if isinstance(op, str) else [op] if op is not None else list(OPS.values())
    rows = [row for each in chosen for row in each.explain(*args, **kwargs)]
    wide = max((len(row.op) for row in rows), default=0)
    name_wide = max((len(row.backend) for row in rows), default=0)
    lines = []
    for row in rows:
        verdict = "chosen" if row.chosen else "ready" if row.reason is None else f"no: {row.reason}"
        lines.append(f"{row.op:<{wide}}  {row.backend:<{name_wide}}  {verdict}")
    return "\n".join(lines)

"""Operators with several backends: how one is chosen, wished for and explained.

An `Op` owns a plain PyTorch reference and an ordered list of faster backends. The first backend whose
`why_not` has nothing to say serves the call; the answer is remembered per signature, so a later call costs
one dictionary look-up.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature as parameters_of
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from ..names import RENAMED_OPERATORS, hint, unknown_name
from ..overlay import Overlay, check
from . import debug_mode
from .devices import find_first_tensor
from .workspace import copy_results, total_bytes

REFERENCE = "reference"
OPS: dict[str, Op] = {}


_MEMORY_DOC = """
    Memory of the caller's: `out=`, a contiguous tensor or a tuple of them as returned, takes the results; `workspace=`,
    uint8 [`workspace_size(...)`], is scratch. With both, kernels on a GPU allocate nothing.
    """
_OVERLAY_DOC = """
    Edits: with `overlay=`, an `Overlay` as `process_logits_overlay` makes it for {0}, they are folded in on load by
    kernels on a GPU; other backends are given a copy of the logits in float32.
    """
_MEMORY_ARGUMENTS = frozenset(("out", "workspace", "overlay"))


class UnsupportedError(ValueError):
    """The backend that was asked for cannot serve this call; the message lists every backend's reason."""


class FallbackWarning(UserWarning):
    """A call is served by the slow reference because no faster backend can serve it."""


def _no_reason(*args: Any, **kwargs: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    name: "cpu", "cuda", "triton", ...; load: returns the callable (imported on first use; same parameters as
    the operator); why_not: called with the arguments of a call, returns None or one sentence that says why
    this backend cannot serve it (shapes, dtypes and devices only: its answer is cached per signature, see
    `Op`); missing: the reason that needs no arguments (extension not built, no such device), or None;
    graph_devices: types of devices on which torch.compile may put this backend into a graph (its callable only
    calls a registered operator with a fake kernel and kernels for these), with the name by which it is wished for
    there; not_worth: like why_not, but only keeps
    the automatic choice away; an explicit request may still have the backend.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    why_not: Callable[..., str | None] = _no_reason
    missing: Callable[[], str | None] = _no_reason
    graph_devices: Mapping[str, str] = field(default_factory=dict)
    not_worth: Callable[..., str | None] = _no_reason


class Explanation(NamedTuple):
    """One row of `explain`: `reason` is None for a backend that can serve."""

    op: str
    backend: str
    chosen: bool
    reason: str | None


@dataclass(frozen=True)
class _BackendRequest:
    """Backend names asked for: one for all operators and exceptions by operator name."""

    everywhere: str | None
    by_op: tuple[tuple[str, str], ...] = ()

    def name_for(self, op: str) -> str | None:
        for name, _ in self.by_op:  # of the environment, read before there were any: `use_backend` looks at its own
            if name not in OPS:
                raise ValueError(_no_operator("SPECDEC_BACKEND", name))
        return dict(self.by_op).get(op, self.everywhere)


def _no_operator(subject: str, got: str) -> str:
    return unknown_name(f"{subject} operator", got, sorted(OPS), renamed=RENAMED_OPERATORS, kind="operator")


def _parse_request(text: str) -> _BackendRequest | None:
    """A request from text like "cpu" or "cpu,tree_attention=sdpa"; None from "" or "auto"."""
    everywhere, by_op = None, []
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, equals, name = part.rpartition("=")
        if equals:
            by_op.append((op.strip(), name.strip()))
        elif name != "auto":
            everywhere = name
    return _BackendRequest(everywhere, tuple(by_op)) if everywhere or by_op else None


_FROM_ENVIRONMENT = _parse_request(os.environ.get("SPECDEC_BACKEND", ""))
_REQUEST: ContextVar[_BackendRequest | None] = ContextVar("specdec_backend", default=_FROM_ENVIRONMENT)


@contextmanager
def use_backend(name: str | None = None, **by_op: str) -> Iterator[None]:
    """Inside the block operators run on the named backend, or raise UnsupportedError where it cannot serve.

    `use_backend("reference")` for all operators, `use_backend(tree_attention="sdpa")` for one,
    `use_backend()` for the automatic choice. Holds for the current thread and context only; a compiled program keeps
    the backends of the time when it was compiled. The environment
    variable SPECDEC_BACKEND ("cpu", or "cpu,tree_attention=sdpa"), read at import, sets the request outside of
    any block.

    Raises: ValueError for an operator that does not exist.
    """
    for op in by_op:
        if op not in OPS:
            raise ValueError(_no_operator("use_backend", op))
    token = _REQUEST.set(_BackendRequest(name, tuple(sorted(by_op.items()))) if name or by_op else None)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def first_tensor_key(*args: Any, **kwargs: Any) -> Hashable:
    """Default signature: device and dtype of the first tensor among the arguments, most often the first of them; of a
    call by keywords alone, of all its tensors.
    """
    if not args:  # which one comes first means nothing
        return tuple((name, t.device, t.dtype) for name, t in sorted(kwargs.items()) if isinstance(t, torch.Tensor))
    first = args[0]
    if not isinstance(first, torch.Tensor):
        first = find_first_tensor((*args, *kwargs.values()))
        if first is None:  # who is called says what it wants
            return None
    return first.dtype if first.is_cpu else (first.device, first.dtype)  # on the CPU every microsecond counts


class Op:
    """Callable operator with a reference and faster backends.

    name: unique; reference: plain PyTorch on any device; backends: in order of preference; key: called with
    the arguments, returns everything (hashable) that a `why_not` of these backends looks at, device type and
    dtypes first; direct_backends: the operator takes `out` (a tensor, or a tuple, as it returns them) and `workspace` (uint8,
    `workspace_size` bytes), and these backends take both themselves; results of the others are copied to `out`; look:
    raises for data that the reference refuses, called with the arguments in `debug_mode`, integers on the host; overlaid:
    the argument, logits or a distribution, that `overlay` lies over: Triton's launches take it, the others edited
    logits. The reference is always the last resort; being chosen automatically it warns once per reason.
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
        """Backend that served the latest call in this process: a diagnostic for tests and benchmarks."""
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
        if is_compiling():
            return self._call_traced(*args, **kwargs)
        if self._takes_memory and not _MEMORY_ARGUMENTS.isdisjoint(kwargs):
            return self._call_with_memory(*args, **kwargs)
        self.last_backend, run = self._select_backend(args, kwargs)
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:  # torch 2.15 no longer tells C++'s invalid_argument from other exceptions
            if str(error).startswith(self.name):
                raise ValueError(str(error)) from None
            raise

    def with_data_check(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A launch of this operator, in `debug_mode` behind a look at its data."""
        return (
            debug_mode.with_data_check(launch, self._check_data)
            if debug_mode.ENABLED and self._check_data is not None
            else launch
        )

    def _select_backend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Callable[..., Any]]:
        """(name, callable) of the backend that serves a call, remembered."""
        request = _REQUEST.get()
        signature = self._key(*args, **kwargs) if request is None else (request, self._key(*args, **kwargs))
        choice = self._choices.get(signature)
        if choice is None:
            choice = self._choices[signature] = self._find_backend(request, args, kwargs)
        return choice

    def _call_with_memory(
        self, *args: Any, out: Any = None, workspace: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """A call with memory of the caller's, or with edits over its logits."""
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
        """The arguments of a call with a copy of the logits, in float32, that is edited."""
        name, place = str(self._overlaid), self._overlaid_place
        known = args[place] if place < len(args) else kwargs[name]
        logits, dist = (known[0], known) if isinstance(known, (tuple, list)) else (known, None)
        check(self.name, overlay, logits)
        edited = overlay.over(logits)
        value = edited if dist is None else (edited, *dist[1:])
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def workspace_size(self, *args: Any, **kwargs: Any) -> int:
        """Bytes of `workspace=` with which this call allocates no scratch; 0 where its backend needs none."""
        kwargs.pop("overlay", None)
        scratch = getattr(self._find_backend(_REQUEST.get(), args, kwargs, quiet=True)[1], "scratch", None)
        return total_bytes(scratch(*args, **kwargs)) if scratch is not None else 0

    def __repr__(self) -> str:
        return f"<Op {self.name}: {' > '.join(b.name for b in self.backends)}>"

    def choose_backend(self, *args: Any, **kwargs: Any) -> str:
        """Name of the backend that would serve this call. Raises: UnsupportedError."""
        return self._find_backend(_REQUEST.get(), args, kwargs, quiet=True)[0]

    def bind_backend(self, *args: Any, **kwargs: Any) -> tuple[str, Callable[..., Any]]:
        """(name, callable) of the backend that would serve this call, for callers that make it so often that they keep
        the answer. Raises: UnsupportedError.
        """
        return self._find_backend(_REQUEST.get(), args, kwargs, quiet=True)

    def explain(self, *args: Any, **kwargs: Any) -> list[Explanation]:
        """One row per backend, in order of preference; with arguments, for exactly that call."""
        request = _REQUEST.get()
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
        """Drops cached choices (after an extension was built or loaded by hand)."""
        self._choices.clear()
        self._graph_calls.clear()
        self._warned.clear()

    @staticmethod
    def _reason_against(backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return backend.missing() or backend.why_not(*args, **kwargs)

    def _find_backend(
        self, request: _BackendRequest | None, args: tuple[Any, ...], kwargs: dict[str, Any], quiet: bool = False
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
                return backend.name, self.with_data_check(run) if backend.name in ("cuda", "triton") else run
            reasons.append(f"{backend.name}: {reason}")
        everyone = [
            f"{b.name}: {self._reason_against(b, args, kwargs) or 'can serve this call'}" for b in self.backends
        ]
        known = any(b.name == wanted for b in self.backends)
        near = hint(wanted, {b.name for op in OPS.values() for b in op.backends})
        problem = "cannot serve this call" if known else f"is not a backend of this operator{near}"
        asked = " (of SPECDEC_BACKEND)" if request is _FROM_ENVIRONMENT else ""
        raise UnsupportedError(
            f"{self.name}: backend {wanted!r}{asked} {problem}. Backends:\n  " + "\n  ".join(everyone)
        )

    def _call_traced(self, *args: Any, **kwargs: Any) -> Any:
        """The call as torch.compile sees it: the backend is picked once, while tracing."""
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
    """Key of the callable, which is in op._graph_calls afterwards. Raises UnsupportedError where a request is not met."""
    op, request = OPS[name], _REQUEST.get()
    wanted = request.name_for(name) if request is not None else None
    key = device if wanted is None else f"{device}, {wanted}"
    if key not in op._graph_calls:
        fits = [b for b in op.backends if device in b.graph_devices and b.missing() is None]
        fits = [b for b in fits if wanted in (None, b.graph_devices[device])]
        if not fits and wanted not in (None, REFERENCE):
            raise UnsupportedError(f"{name}: backend {wanted!r} cannot serve compiled code on {device}")
        op._graph_calls[key] = fits[0].load() if fits else op.reference
    return key


# What torch.compiler.assume_constant_result does, without importing the compiler: runs while tracing.
_pick_graph_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(op: Op | str | None = None, *args: Any, **kwargs: Any) -> str:
    """Table of operators and backends, which one is chosen and why the others are not.

    op: an operator, its name, or None for all; args, kwargs: a call to explain exactly. Raises: ValueError
    for an unknown name.
    """
    if isinstance(op, str) and op not in OPS:
        raise ValueError(_no_operator("explain", op))
    chosen = [OPS[op]] if isinstance(op, str) else [op] if op is not None else list(OPS.values())
    rows = [row for each in chosen for row in each.explain(*args, **kwargs)]
    wide = max((len(row.op) for row in rows), default=0)
    name_wide = max((len(row.backend) for row in rows), default=0)
    lines = []
    for row in rows:
        verdict = "chosen" if row.chosen else "ready" if row.reason is None else f"no: {row.reason}"
        lines.append(f"{row.op:<{wide}}  {row.backend:<{name_wide}}  {verdict}")
    return "\n".join(lines)

"""A guard that checks on a CPU whether a program can be captured as a CUDA graph.

Under the guard, operations raise that wait for a device, copy numbers from the host or make a shape depend on data. It
also records the operators with their shapes, and the addresses of tensors from outside. `host_reads` counts waits, and
allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec_fast.cache import paged
from specdec_fast.engine.cuda_graph import runner
from specdec_kernels.graph_capture import without_collection

WAITS = {"_local_scalar_dense", "equal", "is_nonzero"}
DEPENDS_ON_DATA = {"nonzero", "nonzero_static", "masked_select", "unique", "_unique", "_unique2", "unique_dim"}
FROM_HOST = {"lift_fresh", "lift_fresh_copy", "lift"}
ON_HOST = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "pin_memory")


class CaptureError(AssertionError):
    """The program could not be captured."""


class Guard(TorchDispatchMode):
    """trace: (operator, shapes of its results) in order; outside: addresses of tensors that it did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, tuple[Any, ...]]] = []
        self.outside: list[int] = []
        self._made: dict[int, Tensor] = {}  # kept alive, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in WAITS or name in FROM_HOST or name in DEPENDS_ON_DATA:
            raise CaptureError(f"{func} cannot be captured")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise CaptureError(f"{func} without output_size: its shape depends on data")
        if name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            raise CaptureError(f"{func} by a mask: its shape depends on data")
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self._made:
                self.outside.append(each.data_ptr())
        found = func(*args, **kwargs)
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in results:
            address = each.untyped_storage().data_ptr()
            if address not in given:
                self._made[address] = each
        self.trace.append((str(func), tuple(tuple(each.shape) for each in results)))
        return found


@contextmanager
def capture_guard() -> Iterator[Guard]:
    """The guard, around one run of a program."""

    def refuse(name: str) -> Any:
        def raises(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(f"Tensor.{name} takes data to the host")

        return raises

    guard = Guard()
    with ExitStack() as stack:
        stack.enter_context(without_collection())  # as in a capture
        for name in ON_HOST:
            stack.enter_context(patch.object(Tensor, name, refuse(name)))
        stack.enter_context(guard)
        yield guard


class _Reads(TorchDispatchMode):
    """seen: operations that read data to the host or made a shape depend on it; nested ones count once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        masked = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if not self.inside and (name in WAITS or name in DEPENDS_ON_DATA or masked):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

    def watched(self, name: str) -> Any:
        return self._counted(getattr(Tensor, name), [name])

    def unwatched(self, deed: Any) -> Any:
        """Wraps a function that does not read to the host, for any inner calls."""
        return self._counted(deed, [])

    def _counted(self, deed: Any, as_reads: list[str]) -> Any:
        def counts(*args: Any, **kwargs: Any) -> Any:
            outer, self.inside = self.inside, True
            if not outer:
                self.seen.extend(as_reads)
            try:
                return deed(*args, **kwargs)
            finally:
                self.inside = outer

        return counts


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yields the operations inside the block that wait for a device, in order."""
    reads = _Reads()
    with ExitStack() as stack:
        for name in ON_HOST:
            stack.enter_context(patch.object(Tensor, name, reads.watched(name)))
        stack.enter_context(patch.object(paged, "write_entries", reads.unwatched(paged.write_entries)))
        stack.enter_context(reads)
        yield reads.seen


def guard_programs(monkeypatch: pytest.MonkeyPatch) -> dict[Callable[[], None], list[Guard]]:
    """Guards every later run of a captured program. Returns the guards by program."""
    runs: dict[Callable[[], None], list[Guard]] = {}

    def guarded(program: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
        def run() -> None:
            with capture_guard() as guard:
                program()
            runs.setdefault(program, []).append(guard)

        return run

    monkeypatch.setattr(runner, "capture", guarded)
    return runs


def check_repeats(runs: dict[Callable[[], None], list[Guard]]) -> set[str]:
    """Checks that every run of a program has the same operators, shapes and addresses of tensors from outside.

    Returns the names of all operators.
    """
    assert max(map(len, runs.values())) > 2
    for guards in runs.values():
        for guard in guards[1:]:
            assert guard.trace == guards[0].trace
            assert guard.outside == guards[0].outside
    return {name for guards in runs.values() for name, _ in guards[0].trace}

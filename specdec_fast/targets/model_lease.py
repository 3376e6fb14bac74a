"""Uses of a model by targets: the model is given back as it was when its last target is closed.

Tests: tests/targets/test_model_lease.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specdec_fast.targets import attention
from specdec_fast.targets.model_state import AttentionNames, ModelState, set_attention

__all__ = ["ModelLease", "modules_in_use"]


class _Shared:
    """The state of a model before its first target, and the number of targets that use it now."""

    def __init__(self, model: Any) -> None:
        self._state = ModelState(model)
        self._count = 0
        self._lent = self._state.read_attention()  # what the model had when it was last served
        self._served: AttentionNames = []  # what `use_attention` made of it; empty before the first time

    def restore_attention(self) -> None:
        """Gives the model the attention that it had before its first target."""
        self._state.restore_attention()

    def serve_attention(self, model: Any) -> None:
        """Gives the model the attention of targets, and remembers its present one."""
        present = self._state.read_attention()
        if not any(name in (attention.NAME, attention.PROBE_NAME) for _, name in present):
            self._lent = present
        if self._served:
            set_attention(self._served)
        else:
            attention.use_attention(model, attention.NAME)
            self._served = self._state.read_attention()

    def lend_attention(self) -> None:
        """Gives the model the attention that it had before it was last served."""
        set_attention(self._lent)

    def take(self) -> None:
        """Counts one more target."""
        self._count += 1

    def give(self) -> None:
        """Counts one target less. The last one restores the model."""
        self._count -= 1
        if not self._count:
            self._state.restore()


_SHARED: weakref.WeakKeyDictionary[Any, weakref.ref[_Shared]] = weakref.WeakKeyDictionary()
"""Model -> its recorded state, as long as a target uses the model."""
_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
"""Model -> what a pass of its modules holds."""


def modules_in_use(model: Any) -> threading.RLock:
    """Returns the lock that passes of a model's modules hold, since hooks and skipped layers change the modules.

    Threads may run passes of one model for several targets. torch gives two hooks one number if threads register them
    at once, and one of them is lost.

    Args:
        model: A transformers model.
    """
    found = _LOCKS.get(model)
    return _LOCKS.setdefault(model, threading.RLock()) if found is None else found


def _end(shared: _Shared, before: list[Callable[[], None]]) -> None:
    """Ends one use of a model."""
    for restore in before:
        restore()
    shared.give()


class ModelLease:
    """One target's use of a model, from before it changes the model until it is released or garbage collected.

    Targets may share a model. It is restored when the last of them ends.

    Args:
        model: A transformers model.
    """

    def __init__(self, model: Any) -> None:
        known = _SHARED.get(model)
        shared = None if known is None else known()
        if shared is None:
            if attention.is_served(model.config):  # by a target that was never closed
                attention.use_attention(model, "eager")
            shared = _Shared(model)
            _SHARED[model] = weakref.ref(shared)
        shared.take()
        self._shared: _Shared | None = shared
        self._before_end: list[Callable[[], None]] = []
        self._when_collected = weakref.finalize(self, _end, shared, self._before_end)
        self._when_collected.atexit = False

    def before_end(self, restore: Callable[[], None]) -> None:
        """Adds a function that is called once when this use ends."""
        self._before_end.append(restore)

    def release(self) -> None:
        """Ends this use. Calling it twice is harmless."""
        shared, self._shared = self._shared, None
        self._when_collected.detach()
        if shared is not None:
            _end(shared, self._before_end)

    def restore_attention(self) -> None:
        """Gives the model the attention that it had before its first target, until another is set."""
        assert self._shared is not None
        self._shared.restore_attention()

    def serve_attention(self, model: Any) -> None:
        """Gives the model the attention of targets. It is called in passes, so it takes little time from then on."""
        assert self._shared is not None
        self._shared.serve_attention(model)

    def lend_attention(self) -> None:
        """Gives the model the attention that it had when it was last served, until the next pass of a target.

        Its forward and transformers' `generate` work until then. Call it between steps.
        """
        assert self._shared is not None
        self._shared.lend_attention()

    def release_explicitly(self) -> None:
        """Lets only `release` end this use, for a model that disappears together with its target."""
        self._when_collected.detach()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Releases this lease if the block raises anything, interruptions included."""
        try:
            yield
        except BaseException:
            self.release()
            raise

"""The end of an engine: its requests end, and its models are given back as they were.

Tests: tests/engine/test_closing.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from specdec_fast.engine.request import Handle
from specdec_fast.engine.synchronized import synchronized


class Closeable(ABC):
    """An engine that can be closed, and that is a context manager which closes it. `Engine` derives from it.

    Attributes:
        closed: Whether the engine is closed.
    """

    def __init__(self) -> None:
        self.closed = False
        self._closing = ExitStack()
        self._is_inside_step = False

    def on_close(self, call: Callable[[], object]) -> None:
        """Adds a call that `close` makes, after the calls that were added later.

        Args:
            call: A function without arguments. The other calls are made even if it raises.
        """
        self._closing.callback(call)

    @synchronized
    def close(self) -> None:
        """Cancels all requests and gives the models back.

        A model that was passed as an object has its attention, its modes and the layout of its weights back when the
        last engine that uses it is closed. transformers can then use it as before. Calling it twice is harmless.

        Raises:
            RuntimeError: Inside of a step.
        """
        self._check_between_steps()
        if not self.closed:
            self.closed = True
            with self._closing:
                for handle in self._unfinished():
                    self._closing.callback(self.cancel, handle)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raises ValueError if the engine is closed."""
        if self.closed:
            raise ValueError("engine: it is closed, and its models are given back; load another one")

    @contextmanager
    def _inside_step(self) -> Iterator[None]:
        """Marks a block in which drafter, target, logits processors and rule run."""
        self._is_inside_step = True
        try:
            yield
        finally:
            self._is_inside_step = False

    def _check_between_steps(self) -> None:
        """Raises RuntimeError inside of a step, where code of users runs, such as logits processors and drafters."""
        if self._is_inside_step:
            raise RuntimeError(
                "engine: got a call inside of one of its own steps, which would change the rows that the step works "
                "on; expected it between steps; use another engine there"
            )

    @abstractmethod
    def _unfinished(self) -> list[Handle]:
        """Queued and running requests."""

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Ends a request now."""

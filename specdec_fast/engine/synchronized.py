"""Methods that hold a lock of their object. Tests: tests/engine/test_threads.py, tests/engine/test_streaming.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def synchronized(method: Method) -> Method:
    """Decorates a method, so that it holds `self.lock` while it runs.

    The lock is a `threading.RLock`, so such methods may call each other.

    Args:
        method: A method of an object with an attribute `lock`.

    Returns:
        The method with the lock.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def is_held_here(lock: Any) -> bool:
    """Returns whether this thread holds a `threading.RLock`.

    A finalizer runs wherever the garbage collector does, inside a method that holds the lock too, and could enter it
    again there.
    """
    return bool(lock._is_owned())  # `threading.Condition` asks so too

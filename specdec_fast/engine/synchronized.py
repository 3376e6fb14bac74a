"""Methods that hold a lock of their object. Tests: tests/engine/test_threads.py."""

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

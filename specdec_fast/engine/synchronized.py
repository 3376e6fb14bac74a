"""One thread at a time: methods of an object that wait for each other. Tests: tests/engine/test_threads.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def synchronized(method: Method) -> Method:
    """A method of an object with a lock `lock` that it holds while it runs (`threading.RLock`, for calls within)."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]

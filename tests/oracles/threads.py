"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(*work: Callable[[], Any]) -> list[Any]:
    """Runs each function in its own thread. Returns what they returned or raised."""
    found: list[Any] = [None] * len(work)

    def run(at: int) -> None:
        try:
            found[at] = work[at]()
        except BaseException as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(work))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    return found

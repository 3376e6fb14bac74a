"""Servers that end with the test, and that hold nothing then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from oracles.toy_server import Running, make_engine, nothing_is_held, start_server, wait_for

from specdec_fast import Engine


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts a server: `start(engine, shutdown_timeout=5, **settings)`."""
    running: list[Running] = []

    def begin(engine: Engine | None = None, **options: Any) -> Running:
        running.append(start_server(engine or make_engine(), **options))
        return running[-1]

    yield begin
    for each in running:
        each.stop()
        assert nothing_is_held(each.engine)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server with the default settings, for all tests of a module."""
    running = start_server(make_engine())
    yield running
    wait_for(lambda: nothing_is_held(running.engine))
    running.stop()

"""Runs the application with uvicorn, and ends it in order. Tests: tests/server/test_shutdown.py."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType

import uvicorn

from specdec_fast.engine.engine import Engine
from specdec_fast.server.app import create_app
from specdec_fast.server.generation import Service
from specdec_fast.server.settings import Settings

_KEEP_ALIVE = 30
_GRACE = 2
"""Seconds that clients have to read the errors of texts that the shutdown ended."""
_CUT_OFF = ("uvicorn.error", "asyncio")
"""Loggers that report each request that an end at once cuts off, with a traceback."""


def bind(host: str, port: int) -> socket.socket:
    """Reserves an address before a model is loaded.

    Args:
        host: Host name or IP address.
        port: Port; 0 selects a free one.

    Returns:
        The bound socket, which does not listen yet.

    Raises:
        ValueError: If the address is not available.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--host {host} --port {port}: {reason}; expected a free address of this machine") from None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether only this machine reaches a socket."""
    return ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Returns the address of a socket as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server that lets texts finish when it is asked to end.

    Args:
        service: The service.
        shutdown_timeout: Seconds that texts have to finish. Then they end with an error.
        started: Called when requests are accepted.
        finishing: Called with the number of texts that the end of the server waits for, if there are any.
    """

    def __init__(
        self,
        service: Service,
        *,
        shutdown_timeout: float = 30.0,
        started: Callable[[], None] = lambda: None,
        finishing: Callable[[int], None] = lambda count: None,
    ) -> None:
        backstop = math.ceil(shutdown_timeout) + _GRACE
        super().__init__(
            uvicorn.Config(
                create_app(service),
                lifespan="on",
                log_level="warning",
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=backstop,
            )
        )
        self._service, self._timeout = service, shutdown_timeout
        self._announce, self._announce_end = started, finishing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept requests."""
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting requests, waits for running ones, and ends those that take too long."""
        self._service.drain()
        if (count := self._service.num_texts) and not self.force_exit:
            self._announce_end(count)
        timer = asyncio.get_running_loop().call_later(self._timeout, self._service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM in a block. uvicorn raises them again after it, which would end it by an error."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends in order at the first signal, and at once at a further SIGINT, without reports of what it cuts off."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            _set_disabled(True)

    def serve_until_stopped(self, sockets: Sequence[socket.socket]) -> None:
        """Serves until SIGINT or SIGTERM. A second SIGINT ends it at once.

        Args:
            sockets: Bound sockets.

        Raises:
            KeyboardInterrupt: If a second SIGINT ended it.
        """
        try:
            self.run(list(sockets))
        finally:
            _set_disabled(False)
            self._service.stop(timeout=_GRACE)
        if self.force_exit:
            raise KeyboardInterrupt


def _set_disabled(disabled: bool) -> None:
    for name in _CUT_OFF:
        logging.getLogger(name).disabled = disabled


@contextmanager
def serving(
    engine: Engine, settings: Settings, *, host: str = "127.0.0.1", port: int = 0, shutdown_timeout: float = 30.0
) -> Iterator[str]:
    """Serves an engine from a thread while a block runs, for notebooks and tests.

    Args:
        engine: The engine. Only the server uses it inside the block.
        settings: Settings of the server.
        host: Host name or IP address.
        port: Port; 0 selects a free one.
        shutdown_timeout: Seconds that texts have to finish at the end of the block.

    Yields:
        The address of the server, such as "http://127.0.0.1:8000".

    Raises:
        RuntimeError: If the server does not start. Its log has the reason.
    """
    ready = threading.Event()
    server = Server(Service(engine, settings), shutdown_timeout=shutdown_timeout, started=ready.set)
    with bind(host, port) as bound:
        thread = threading.Thread(target=server.serve_until_stopped, args=([bound],), name="specdec-server")
        thread.start()
        try:
            while not ready.wait(0.1):
                if not thread.is_alive():
                    raise RuntimeError("the server ended while it started; its log has the reason")
            yield url(bound)
        finally:
            server.should_exit = True
            thread.join()

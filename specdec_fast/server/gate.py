"""What a request passes before its body is read: the API key, and the limit of the body.

Tests: tests/server/test_limits.py.
"""

from __future__ import annotations

from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_fast.server.errors import APIError
from specdec_fast.server.metrics import Metrics
from specdec_fast.server.settings import Settings


class Gate:
    """ASGI middleware that refuses requests without the key and bodies that are too long, and counts all requests.

    Args:
        app: The application behind it.
        settings: Settings of the server.
        metrics: Counters of the server.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection of the ASGI server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = 0

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")  # few labels, whatever clients ask for
                self._metrics.http.labels(path, str(message["status"])).inc()
            await send(message)

        async def limited_receive() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self._settings.max_body:
                raise self._too_long()
            return message

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, counted_send)
        else:
            await self._app(scope, limited_receive, counted_send)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers, key = Headers(scope=scope), self._settings.api_key
        if key is not None and scope["path"].startswith("/v1/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not compare_digest(given.strip().encode(), key.encode()):
                return APIError(401, "expected the header Authorization: Bearer with the key", code="invalid_api_key")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._settings.max_body:
            return self._too_long()
        return None

    def _too_long(self) -> APIError:
        return APIError(413, f"body: got more than {self._settings.max_body} bytes; shorten it, or raise --max-body")

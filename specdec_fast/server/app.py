"""The application: its routes, and the life of the engine's thread. Tests: tests/server/."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from specdec_fast import __version__
from specdec_fast.server.chat import chat_routes
from specdec_fast.server.completions import completion_routes
from specdec_fast.server.errors import StoppedError, UnknownModelError, install_error_handlers
from specdec_fast.server.gate import Gate
from specdec_fast.server.generation import Service


def create_app(service: Service) -> FastAPI:
    """Builds the ASGI application of a service. It starts and stops the engine's thread.

    Args:
        service: The service.

    Returns:
        The application.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="specdec-fast", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Gate, settings=service.settings, metrics=service.metrics)
    install_error_handlers(app)
    app.include_router(completion_routes(service))
    app.include_router(chat_routes(service))
    name = service.settings.model_name
    limit = service.engine.state.max_length
    started = int(time.time())
    model = {"id": name, "object": "model", "created": started, "owned_by": "specdec-fast", "max_model_len": limit}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> dict[str, Any]:
        if model_id != name:
            raise UnknownModelError(model_id, name)
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not service.healthy:
            raise StoppedError
        return {"status": "ok"}

    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)  # of probes that read no body

    @app.get("/metrics")
    async def metrics() -> Response:
        return service.metrics.response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return app

"""An OpenAI-compatible HTTP server over one engine (extra `serve`). `specdec serve` runs it.

One thread steps the engine (`engine_loop`). The event loop of asyncio does everything else: it reads requests, hands
them to that thread, and writes what comes back.
Tests: tests/server/.
"""

from specdec_fast.server.app import create_app
from specdec_fast.server.generation import Service
from specdec_fast.server.settings import Settings
from specdec_fast.server.uvicorn_server import Server, serving

__all__ = ["Server", "Service", "Settings", "create_app", "serving"]

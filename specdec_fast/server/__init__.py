"""An OpenAI-compatible HTTP server over one engine (extra `serve`). `specdec serve` runs it.

One thread steps the engine (`engine_loop`). The event loop of asyncio does everything else: it reads requests, hands
them to that thread, and writes what comes back.
Tests: tests/server/.
"""

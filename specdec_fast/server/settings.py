"""Settings and limits of the server. Tests: tests/server/test_limits.py."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_fast.integrations.grammars import DEFAULT_BACKEND, check_backend


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the server.

    Attributes:
        model_name: Name of the model in requests and responses.
        api_key: Key that requests below /v1 must carry, or None for no key.
        max_queue: Most texts that wait for a free row of the engine. Further requests get status 429.
        max_body: Most bytes in the body of a request.
        grammar_backend: Library that makes the grammars of response formats.

    Raises:
        ValueError: If a number is out of range, or if a text is empty.
    """

    model_name: str
    api_key: str | None = None
    max_queue: int = 64
    max_body: int = 4 * 2**20
    grammar_backend: str = DEFAULT_BACKEND

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 0), ("max_body", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}; expected at least {least}")
        check_backend(self.grammar_backend)
        if not self.model_name:
            raise ValueError("served_model_name: got ''; expected a name")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: got an empty or unprintable key; expected printable ASCII characters")

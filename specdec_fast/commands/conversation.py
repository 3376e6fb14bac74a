"""The history of a chat, and how much of it fits into the context. Tests: tests/commands/test_conversation.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_fast.engine.engine import Engine
    from specdec_fast.engine.request import Handle
    from specdec_fast.sampling.params import SamplingParams

_LEAST_ROOM = 4
"""The part of the context that answers get at least, as a divisor, if `max_new_tokens` asks for more."""


class Conversation:
    """Questions and answers, which every question submits again.

    Args:
        engine: The engine.
        system: System message, or None.
        template: Other arguments of `Engine.submit_chat`.

    Attributes:
        turns: Pairs of question and answer.

    Raises:
        ValueError: If there is no chat template, or if it refuses the system message.
    """

    def __init__(
        self, engine: Engine, system: str | None = None, template: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.turns: list[tuple[str, str]] = []
        self._engine, self._template = engine, template
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, or None. One that the chat template refuses raises ValueError and changes nothing."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._engine.encode_chat([*_system(text), {"role": "user", "content": "Hello"}], **self._template)
        self._system = text

    def submit(self, question: str, params: SamplingParams) -> tuple[Handle, int]:
        """Submits the whole conversation with a new question.

        If too little of the context is left for an answer, the oldest turns are dropped for good.

        Args:
            question: The question.
            params: Sampling parameters of the answer.

        Returns:
            The handle, and the number of turns that were dropped.

        Raises:
            ValueError: If the engine refuses the question. The conversation stays as it was.
        """
        limit = self._engine.state.max_length
        most = limit - min(params.max_new_tokens, limit // _LEAST_ROOM)
        dropped = 0
        while dropped < len(self.turns) and self._length(question, dropped) > most:
            dropped += 1
        handle = self._engine.submit_chat(self._messages(question, dropped), params, **self._template)
        del self.turns[:dropped]
        return handle, dropped

    def keep(self, question: str, answer: str) -> None:
        """Adds a turn."""
        self.turns.append((question, answer))

    def _length(self, question: str, dropped: int) -> int:
        """Returns the number of tokens of the prompt without the oldest turns."""
        return len(self._engine.encode_chat(self._messages(question, dropped), **self._template))

    def _messages(self, question: str, dropped: int) -> list[dict[str, str]]:
        turns = [
            {"role": role, "content": text}
            for turn in self.turns[dropped:]
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*_system(self.system), *turns, {"role": "user", "content": question}]


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]

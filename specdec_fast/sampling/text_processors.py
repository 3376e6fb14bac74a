"""Logits processors that read the text of every node: custom ones, n-grams that may not repeat, and bad words.

They change logits before all others, on the host. Tests: tests/sampling/test_text_processors.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_fast.sampling.banned_continuations import BannedContinuations, forbid
from specdec_fast.sampling.custom_processors import CustomProcessors, ProcessorFailure
from specdec_kernels import NodePaths

if TYPE_CHECKING:
    from specdec_fast.sampling.params import SamplingParams


def reads_text(params: SamplingParams) -> bool:
    """Returns whether a request has processors of this module."""
    return bool(params.logits_processors or params.no_repeat_ngram_size or params.bad_words)


class TextState:
    """The processors of one request, which follow its text.

    Args:
        params: Its parameters.
        prompt_length: Number of prompt tokens.
        tokens: Committed tokens, prompt first.

    Attributes:
        custom: Custom processors, or None.
        banned: Tokens that n-grams and bad words forbid, or None.
    """

    def __init__(self, params: SamplingParams, prompt_length: int, tokens: Sequence[int]) -> None:
        self.custom = self.banned = None
        if params.logits_processors:
            self.custom = CustomProcessors(params.logits_processors, prompt_length, tokens)
        if params.no_repeat_ngram_size or params.bad_words:
            self.banned = BannedContinuations(params.no_repeat_ngram_size, params.bad_word_ids, tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Consumes committed tokens."""
        for each in (self.custom, self.banned):
            if each is not None:
                each.append(tokens)


@dataclass(frozen=True, slots=True)
class TextProcessors:
    """The processors of the B requests of a batch that read texts.

    Attributes:
        states: The processors of each request, or None.
        failures: By packed node, why custom processors have no result in the last call of `apply`.
    """

    states: tuple[TextState | None, ...]
    failures: dict[int, ProcessorFailure] = field(default_factory=dict, compare=False)

    @property
    def has_custom(self) -> bool:
        """Whether some request has custom processors, so that half formats become float32."""
        return any(state is not None and state.custom is not None for state in self.states)

    def apply(self, logits: Tensor, paths: NodePaths, *, drafting: bool) -> Tensor:
        """Processes logits in place, except that custom processors make float32 copies of half formats.

        Args:
            logits: [R, V]; each row belongs to one node.
            paths: The nodes, with the tokens before them.
            drafting: Whether these are the logits of a draft model. Then `failures` stays, and a node at which a custom
                processor fails keeps its logits: any draft is lossless.

        Returns:
            The processed logits, [R, V].
        """
        if self.has_custom and logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        if not drafting:
            self.failures.clear()
        tokens, parents, offsets = paths.tokens.tolist(), paths.parents.tolist(), paths.offsets.tolist()
        nodes = None if paths.nodes is None else paths.nodes.tolist()
        for request, state in enumerate(self.states):
            if state is None:
                continue
            start, stop = offsets[request : request + 2]
            own, row_of = (tokens[start:stop], parents[start:stop]), rows_of_nodes(start, stop, nodes)
            if state.custom is not None:
                failures = state.custom.apply(logits, row_of, *own)
                if not drafting:
                    self.failures.update({start + node: failure for node, failure in failures.items()})
            if state.banned is not None:
                found = state.banned.find(*own, row_of)
                forbid(logits, [*row_of.values()], found, state.banned.everywhere)
        return logits

    def first_failure(self, path: Sequence[int]) -> tuple[int, ProcessorFailure] | None:
        """Returns the first place on a path of packed nodes at which a processor failed, and the failure."""
        return next(((at, self.failures[node]) for at, node in enumerate(path) if node in self.failures), None)


def rows_of_nodes(start: int, stop: int, nodes: Sequence[int] | None) -> Mapping[int, int]:
    """Returns the row of logits of each node of a request.

    Args:
        start: The request's first packed node.
        stop: The packed node after its last one.
        nodes: The packed node of each row, or None if row i belongs to node i.

    Returns:
        Node of the request, from 0 -> row. Nodes without a row are left out.
    """
    if nodes is None:
        return {node: start + node for node in range(stop - start)}
    return {node - start: row for row, node in enumerate(nodes) if start <= node < stop}

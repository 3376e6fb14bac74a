"""Logits processors of users: functions of a text and its logits, called for every node of a draft.

Tests: tests/sampling/test_custom_processors.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

log = logging.getLogger("specdec_fast")

_NOT_PURE = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}
"""Processors of transformers that keep a state between calls or assume one call per token."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """A logits processor for `SamplingParams(logits_processors=[...])`.

    It must be a function of its arguments alone. A step calls it once for every node of the draft, accepted or not,
    with the node's own text. Draft models call it for their tokens too.

    Three kinds of callables are accepted:

    - `processor(token_ids, logits)`, as declared here;
    - `processor(prompt_token_ids, output_token_ids, logits)`, as in vLLM;
    - a `LogitsProcessor` of transformers, which gets tensors [1, n] and [1, V].
    """

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Returns the logits of the next token.

        Args:
            token_ids: Prompt and generated text, the node's own path included.
            logits: float32 (float64 for float64 models) [V]. It may be changed and returned.

        Returns:
            Logits [V] of any float dtype. -inf forbids a token. At least one must be finite; NaN and +inf are errors.
        """
        ...


def _is_of_transformers(processor: object) -> bool:
    """Whether an object is a logits processor of transformers. It is recognised without an import."""
    names = ("LogitsProcessor", "LogitsWarper")
    return any(
        each.__name__ in names and each.__module__.startswith("transformers.") for each in type(processor).__mro__
    )


def name_of(processor: object) -> str:
    """Returns the name of a processor for messages."""
    return str(getattr(processor, "__qualname__", None) or type(processor).__qualname__)


def check_processor(processor: object) -> str | None:
    """Returns what is expected in place of an object that cannot be a logits processor, or None."""
    expected = "callables (token_ids, logits) -> logits"
    if not callable(processor) or isinstance(processor, type):
        return expected
    if _is_of_transformers(processor):
        name = type(processor).__name__
        return f"no {name}, which keeps a state between calls" if name in _NOT_PURE else None
    count = _count_arguments(processor)
    return None if count in (2, 3) else f"{expected}, or (prompt_token_ids, output_token_ids, logits) -> logits"


def _count_arguments(processor: Callable[..., Any]) -> int:
    """The number of positional arguments that a callable requires; 2 or 3 if it takes so many optionally."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # some built-in callables tell nothing
        return 2
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = sum(each.default is each.empty for each in places)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return max(required, 2) if takes_any or len(places) >= 2 else required


@dataclass(frozen=True, slots=True)
class ProcessorFailure:
    """Why a processor has no result for a node."""

    reason: str
    error: Exception | None = None

    def report(self) -> str:
        """Logs the exception, if there is one, and returns the reason."""
        if self.error is not None:
            log.error("%s", self.reason, exc_info=self.error)
        return self.reason


class CustomProcessors:
    """The logits processors that a request brings, which follow its text.

    Args:
        processors: The processors, in order.
        prompt_length: Number of prompt tokens.
        tokens: Committed tokens, prompt first.
    """

    def __init__(self, processors: Sequence[Callable[..., Any]], prompt_length: int, tokens: Sequence[int]) -> None:
        self._calls = [(name_of(each), _calling_convention(each, prompt_length)) for each in processors]
        self._text = list(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Consumes committed tokens."""
        self._text += tokens

    def apply(
        self, logits: Tensor, row_of: Mapping[int, int], tokens: Sequence[int], parents: Sequence[int]
    ) -> dict[int, ProcessorFailure]:
        """Processes the logits of nodes of a tree, in place, each after its own path.

        Args:
            logits: float32 or float64 [R, V].
            row_of: Node -> its row of `logits`.
            tokens: Token of each node, root first. The root is committed.
            parents: Parent of each node, -1 for the root. Parents precede children.

        Returns:
            Failures by node. The logits of these nodes are not changed.
        """
        paths: list[list[int]] = [[]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])
        failures = {}
        for node, row in row_of.items():
            failure = self._process(logits[row], paths[node])
            if failure is not None:
                failures[node] = failure
        return failures

    def _process(self, logits: Tensor, path: Sequence[int]) -> ProcessorFailure | None:
        """Processes the logits [V] of one node."""
        found = logits
        for name, call in self._calls:
            given = found.clone()  # a processor may write to it, and then raise
            try:
                found = call([*self._text, *path], given)
                reason = _explain(found, logits)
            except Exception as error:
                return ProcessorFailure(f"logits processor {name}: {type(error).__name__}: {error}", error)
            if reason is not None:
                return ProcessorFailure(f"logits processor {name}: {reason}")
            found = found.to(logits)
        logits.copy_(found)
        return None


def _calling_convention(processor: Callable[..., Any], prompt_length: int) -> Callable[[list[int], Tensor], Any]:
    """Returns a callable (token_ids, logits) for any kind of processor."""
    if _is_of_transformers(processor):

        def of_transformers(text: list[int], logits: Tensor) -> Any:
            found = processor(torch.tensor([text], device=logits.device), logits[None])
            return found[0] if isinstance(found, Tensor) and found.dim() == 2 else found

        return of_transformers
    if _count_arguments(processor) == 3:
        return lambda text, logits: processor(text[:prompt_length], text[prompt_length:], logits)
    return processor


def _explain(found: Any, logits: Tensor) -> str | None:
    """Says what is wrong with the result of a processor, or None."""
    if not isinstance(found, Tensor):
        return f"returned {type(found).__name__}; expected the logits, a tensor [{len(logits)}]"
    if found.shape != logits.shape:
        return f"returned logits of shape {[*found.shape]}; expected [{len(logits)}]"
    if not found.is_floating_point():
        return f"returned logits of {found.dtype}; expected {logits.dtype}"
    largest = float(found.max())
    if largest == -torch.inf:
        return "forbids every token; expected a finite logit"
    if largest != largest or largest == torch.inf:
        own = float(logits.max())
        if own != own or own == torch.inf:
            return None  # the model's own logits are named elsewhere
        return f"returned {largest}; expected finite logits, or -inf for tokens that it forbids"
    return None

"""What drives an engine until texts are there: the text of one request as it grows, or all prompts to their ends.

Tests: tests/engine/test_public_interface.py, tests/engine/test_threads.py, tests/engine/test_interrupts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from specdec_fast.engine.request import Handle, Prompt, pair_with_params, rejected_handle
from specdec_fast.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_fast.engine.engine import Engine


def stream(engine: Engine, handle: Handle) -> Iterator[str]:
    """Yields the text of one request as it grows, and drives the engine until the request ends.

    Several threads may each stream a request of one engine: every step advances all requests, and each thread shows its
    own. The engine is free for others while the caller holds a piece.

    Args:
        engine: The engine that steps.
        handle: The request, which this engine accepted; one that has ended yields its text without a step.

    Yields:
        The text that can no longer change and was not yielded before; never an empty one. All pieces joined are
        `handle.text`. A request without a tokenizer yields nothing.

    Raises:
        ValueError: For a handle of another engine that has not ended; the text that it has already comes first.
        Exception: Whatever a step of the engine raises.
    """
    shown, over = 0, False
    while not over:
        with engine.lock:
            if not (handle.finished or handle.stable_text(shown)):  # another thread's steps may have brought some
                engine._check_owner(handle)
                engine.step()
            over, fresh = handle.finished, handle.stable_text(shown)
        shown += len(fresh)
        if fresh:
            yield fresh


def generate(
    engine: Engine,
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    num_draft_tokens: int | None,
) -> list[Handle]:
    """Runs prompts to their ends, batched with whatever else the engine runs.

    Args:
        engine: The engine that steps.
        prompts: Texts or sequences of token ids.
        params: Parameters of all prompts, or one for each; None for the defaults.
        num_draft_tokens: Draft tokens of each step and request; None for the drafter's default.

    Returns:
        One ended handle per prompt, in their order. A prompt that the engine refuses has a handle with
        `finish_reason="error"` and the exception in `error`; the others run.

    Raises:
        ValueError: For a single text as prompts, or when there are not as many `params` as prompts.
        BaseException: Whatever a step raises, an interrupt too. All requests of this call are cancelled first.
    """
    handles: list[Handle] = []
    try:
        for prompt, own in pair_with_params(prompts, params):
            try:
                handles.append(engine.submit(prompt, own, num_draft_tokens=num_draft_tokens))
            except ValueError as error:
                handles.append(rejected_handle(own, error))
        with torch.inference_mode():  # entered once, not in every step
            while not all(handle.finished for handle in handles):
                engine.step()
    except BaseException:  # the caller never sees these handles, so nobody else could give back what they hold
        with ExitStack() as ends:  # all of them, whatever one raises
            for handle in reversed(handles):
                ends.callback(engine.cancel, handle)
        raise
    return handles

"""Runs an engine until texts are complete: `stream` for one request, `generate` for a batch of prompts.

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
    """Yields the text of one request as it grows, and runs steps until the request ends.

    Several threads may stream requests of one engine. Every step advances all requests, and the lock is free while the
    caller handles a piece.

    Args:
        engine: The engine that runs the steps.
        handle: A request of this engine. If it has ended, no step runs.

    Yields:
        New text that can no longer change, never empty. The pieces joined are `handle.text`. Without a tokenizer there
        are none.

    Raises:
        ValueError: For a running request of another engine, after the text that it has.
        Exception: Whatever a step raises.
    """
    shown, over = 0, False
    while not over:
        with engine.lock:
            if not (handle.finished or handle.stable_text(shown)):  # unless another thread has made progress
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
    """Generates texts for prompts, batched with the other requests of the engine.

    Args:
        engine: The engine that runs the steps.
        prompts: Texts or sequences of token ids.
        params: Sampling parameters of all prompts, or one for each. None for the defaults.
        num_draft_tokens: Draft tokens per step and request. None for the drafter's default.

    Returns:
        One ended handle per prompt, in their order. A prompt that the engine cannot serve gets a handle with
        `finish_reason="error"` and the exception in `error`; the others run.

    Raises:
        ValueError: For a single text as prompts, or if there are not as many `params` as prompts.
        BaseException: Whatever a step raises, interrupts included. All requests of this call are cancelled first.
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
    except BaseException:  # the caller never gets these handles, so they are cancelled here
        with ExitStack() as ends:  # all of them, even if one raises
            for handle in reversed(handles):
                ends.callback(engine.cancel, handle)
        raise
    return handles

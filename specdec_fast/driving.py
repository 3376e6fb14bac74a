"""What drives an engine until texts are there: the text of one request as it grows, or all prompts to their ends.

Tests: tests/engine/test_surface.py, tests/engine/test_threads.py, tests/engine/test_interrupts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from specdec_fast.request import Handle, Prompt, paired, refused
from specdec_fast.sampling import SamplingParams

if TYPE_CHECKING:
    from specdec_fast.engine import Engine


def stream(engine: Engine, handle: Handle) -> Iterator[str]:
    """See `Engine.stream`."""
    shown, over = 0, False
    while not over:
        with engine.turn:
            if not (handle.finished or handle.released(shown)):  # another thread's steps may have brought some
                engine._own(handle)
                engine.step()
            over, fresh = handle.finished, handle.released(shown)
        shown += len(fresh)
        if fresh:
            yield fresh


def generate(
    engine: Engine,
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    num_draft_tokens: int | None,
) -> list[Handle]:
    """See `Engine.generate`."""
    handles: list[Handle] = []
    try:
        for prompt, own in paired(prompts, params):
            try:
                handles.append(engine.submit(prompt, own, num_draft_tokens=num_draft_tokens))
            except ValueError as error:
                handles.append(refused(own, error))
        with torch.inference_mode():  # entered once, not in every step
            while not all(handle.finished for handle in handles):
                engine.step()
    except BaseException:  # the caller never sees these handles, so nobody else could give back what they hold
        with ExitStack() as ends:  # all of them, whatever one raises
            for handle in reversed(handles):
                ends.callback(engine.cancel, handle)
        raise
    return handles

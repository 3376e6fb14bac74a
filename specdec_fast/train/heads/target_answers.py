"""Text that heads are to foresee: what the target answers to prompts, kept batch by batch, so that a kill loses one.

Tests: tests/train/heads/test_target_answers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

BATCH = 64
"""Prompts whose answers are kept together."""


def ask(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    folder: Path,
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    rank: int = 0,
    size: int = 1,
    report: Callable[[int], None] = lambda count: None,
) -> list[Path]:
    """The files of the answers to all batches of prompts, in order, after asking for those of this process.

    Number `rank` of `size` processes asks for every size-th batch. What is there already is not asked for again, and it
    is the same whoever asks: prompt i has the seed `seed` + i. model: a transformers model, whose attention is its own
    again afterwards, or what `load` takes; report: told how many prompts of this process are done.
    """
    from specdec_fast.loading import load
    from specdec_fast.sampling.params import SamplingParams

    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    files = [folder / f"{at:06d}-{crc32(repr(batch).encode()):08x}.npy" for at, batch in enumerate(batches)]
    own = [at for at in range(rank, len(files), size) if not files[at].exists()]
    if not own:
        return files
    folder.mkdir(parents=True, exist_ok=True)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        engine = load(model, tokenizer=tokenizer)
        for done, at in enumerate(own, 1):
            params = [
                SamplingParams(temperature=temperature, seed=seed + at * BATCH + place, max_new_tokens=new_tokens)
                for place in range(len(batches[at]))
            ]
            handles = engine.generate(list(batches[at]), params)
            _keep([handle for handle in handles if handle.error is None], files[at])
            report(min(done * BATCH, len(own) * BATCH))
    finally:
        if attention is not None:
            model.set_attn_implementation(attention)
    return files


def collect(files: Sequence[Path]) -> np.ndarray:
    """int32 [N]: prompts, whose tokens do not count (counted.py), with their answers, in order, once all processes have
    theirs.

    Prompts that could not be served are not among them. Raises ValueError when none is left.
    """
    while not all(file.exists() for file in files):
        time.sleep(0.1)
    row = np.concatenate([np.zeros(0, np.int32), *(np.load(file) for file in files)])
    if not len(row):
        raise ValueError("training prompts: got none that the target can answer; expected texts below its context")
    return row


def _keep(handles: Sequence[Any], file: Path) -> None:
    partial = file.with_suffix(".partial.npy")
    texts = ([*(~token for token in handle.prompt), *handle.tokens] for handle in handles)
    np.save(partial, np.asarray([token for text in texts for token in text], dtype=np.int32))
    partial.replace(file)

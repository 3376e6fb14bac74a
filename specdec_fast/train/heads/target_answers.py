"""Training text from answers of the target to prompts, stored batch by batch so that a kill loses at most one batch.

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


def generate_answers(
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
    chat: bool = False,
    report: Callable[[int, float], None] = lambda count, left: None,
) -> list[Path]:
    """Generates this process's share of the answers.

    Every size-th batch belongs to a process. Stored batches are not generated again. Prompt i has the seed `seed` + i,
    so the answers do not depend on the process.

    Args:
        model: A model of transformers, whose attention is restored afterwards, or what `load` accepts.
        tokenizer: The model's tokenizer.
        prompts: Prompts of all processes.
        folder: Folder of the stored answers.
        new_tokens: Maximum number of tokens per answer.
        temperature: Sampling temperature.
        seed: Seed of the first prompt.
        rank: Index of this process.
        size: Number of processes.
        chat: Whether each prompt is a question, to which the model's chat template is applied.
        report: Called with the number of prompts that this process has finished, and the remaining seconds.

    Returns:
        Files of all batches, in order; those of other processes may not exist yet.
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
        engine = load(model, drafter="none", tokenizer=tokenizer)
        ends = engine.end_of_turn_ids if chat else ()
        started = time.monotonic()
        for done, at in enumerate(own, 1):
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=seed + at * BATCH + place,
                    max_new_tokens=new_tokens,
                    stop_token_ids=tuple(ends),
                )
                for place in range(len(batches[at]))
            ]
            handles = engine.generate(_encode(engine, batches[at], chat), params)
            _keep([handle for handle in handles if handle.error is None], files[at])
            left = (len(own) - done) * (time.monotonic() - started) / done
            report(min(done * BATCH, len(own) * BATCH), left)
    finally:
        if attention is not None:
            model.set_attn_implementation(attention)
    return files


def load_answers(files: Sequence[Path]) -> np.ndarray:
    """Waits until all processes have stored their answers, and joins them.

    Args:
        files: Files of all batches.

    Returns:
        Tokens, int32 [N]: prompts without loss (`loss_mask`) and their answers. Prompts that failed are left out.

    Raises:
        ValueError: If no answer is left.
    """
    while not all(file.exists() for file in files):
        time.sleep(0.1)
    row = np.concatenate([np.zeros(0, np.int32), *(np.load(file) for file in files)])
    if not len(row):
        raise ValueError("training prompts: got none that the target can answer; expected texts below its context")
    return row


def _encode(engine: Any, prompts: Sequence[str], chat: bool) -> list[Any]:
    """Returns prompts as they are, or the token ids of conversations that begin with them."""
    if not chat:
        return list(prompts)
    return [engine.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]


def _keep(handles: Sequence[Any], file: Path) -> None:
    partial = file.with_suffix(".partial.npy")
    texts = ([*(~token for token in handle.prompt), *handle.tokens] for handle in handles)
    np.save(partial, np.asarray([token for text in texts for token in text], dtype=np.int32))
    partial.replace(file)

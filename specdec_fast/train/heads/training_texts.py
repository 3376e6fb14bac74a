"""What heads are trained on: one row of tokens, from documents. For prompts that the target answers: answers.py.

Tests: tests/train/heads/test_training_texts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_BATCH = 256


def token_row(texts: Iterable[str], tokenizer: Any) -> np.ndarray:
    """int32 [N]: all texts in one row, an end token (where the tokenizer has one) before each.

    Raises ValueError without a text.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    parts: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"] if batch else ():
            parts.append(np.asarray([*(() if end is None else (end,)), *ids], dtype=np.int32))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            flush()
    flush()
    if not parts:
        raise ValueError("training text: got no documents; expected at least one text that is not empty")
    return np.concatenate(parts)


def split(row: np.ndarray, length: int, blocks: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) tokens: the last 32nd is held out, `blocks` blocks of `length` at most.

    Raises ValueError for a row that is too short to train on.
    """
    held = min(max(len(row) // 32, length + 1), blocks * length + 1)
    if len(row) < 3 * length + 2 + held:
        raise ValueError(
            f"training text: got {len(row):,} tokens; expected at least {3 * length + 2 + held:,} for blocks of "
            f"{length}; give more text, or a smaller --length"
        )
    return row[:-held], row[-held:]


def corpus_row(tokenizer: Any) -> np.ndarray:
    """int32 [N]: the training documents of the bundled pair, found on this machine, without those held out.

    Raises ValueError when they are not all here.
    """
    from specdec_fast.train.demo_pair.corpus import held_out, read_corpus

    documents = [document for document in read_corpus() if not held_out(document)]
    order = np.random.default_rng(0).permutation(len(documents))
    return token_row((documents[at].text for at in order), tokenizer)


def text_row(inputs: Sequence[Path], field: str, tokenizer: Any) -> np.ndarray:
    """int32 [N]: the documents in files and folders. Raises ValueError."""
    from specdec_fast.retrieval.documents import find_files, read_documents

    return token_row(read_documents(find_files(inputs), field), tokenizer)

"""Training tokens from documents; `target_answers` makes them from prompts.

Tests: tests/train/heads/test_training_texts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.engine.prompts import added_beginning

_BATCH = 256


def make_token_row(texts: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Tokenizes documents into one row.

    Each document begins as a prompt does, with the special tokens that the tokenizer adds. An end token is before it if
    the tokenizer has one.

    Returns:
        Tokens, int32 [N].

    Raises:
        ValueError: If there is no document.
    """
    end, beginning = getattr(tokenizer, "eos_token_id", None), added_beginning(tokenizer)
    between = [] if end is None or beginning[:1] == [end] else [end]
    parts: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"] if batch else ():
            before = [] if ids[: len(beginning)] == beginning else beginning  # some texts have it already
            parts.append(np.asarray([*between, *before, *ids], dtype=np.int32))
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
    """Splits tokens into a training part and a held-out part: the last 32nd, at most `blocks` blocks of `length`.

    Returns:
        Training tokens and held-out tokens.

    Raises:
        ValueError: If the row is too short to train on.
    """
    held = min(max(len(row) // 32, length + 1), blocks * length + 1)
    if len(row) < 3 * length + 2 + held:
        raise ValueError(
            f"training text: got {len(row):,} tokens; expected at least {3 * length + 2 + held:,} for blocks of "
            f"{length}; give more text, or a smaller --length"
        )
    return row[:-held], row[-held:]


def read_corpus_tokens(tokenizer: Any) -> np.ndarray:
    """Reads the training documents of the bundled pair from this machine, without held-out ones.

    Returns:
        Tokens, int32 [N].

    Raises:
        ValueError: If a document is missing.
    """
    from specdec_fast.train.demo_pair.corpus import held_out, read_corpus

    documents = [document for document in read_corpus() if not held_out(document)]
    order = np.random.default_rng(0).permutation(len(documents))
    return make_token_row((documents[at].text for at in order), tokenizer)


def read_token_row(inputs: Sequence[Path], field: str, tokenizer: Any) -> np.ndarray:
    """Reads documents from files and folders.

    Returns:
        Tokens, int32 [N].

    Raises:
        ValueError: If a file cannot be read, or there is no document.
    """
    from specdec_fast.retrieval.documents import find_files, read_documents

    return make_token_row(read_documents(find_files(inputs), field), tokenizer)

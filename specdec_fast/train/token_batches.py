"""Token arrays of a corpus, and batches that depend on the step number only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec_fast.train.demo_pair.corpus import DOMAINS, Document, held_out


@dataclass(frozen=True, slots=True)
class Tokens:
    """An encoded corpus: training tokens in one row, and held-out documents.

    Attributes:
        train: Training tokens, uint16 [N]: shuffled documents, each with the end token first.
        held: Tokens of held-out documents, uint16 [H].
        held_offsets: First token of each held-out document, int64 [documents + 1].
        held_domain: Domain of each held-out document, as an index into DOMAINS, int64 [documents].
        held_bytes: Length of each held-out document in bytes, int64 [documents].
    """

    train: np.ndarray
    held: np.ndarray
    held_offsets: np.ndarray
    held_domain: np.ndarray
    held_bytes: np.ndarray

    def save(self, path: Path) -> None:
        """Writes an .npz file."""
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Reads a file that `save` wrote."""
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__slots__})

    def held_documents(self) -> list[tuple[str, np.ndarray, int]]:
        """Returns domain, token ids [n] and length in bytes of every held-out document."""
        cuts = self.held_offsets
        return [
            (DOMAINS[int(self.held_domain[i])], self.held[cuts[i] : cuts[i + 1]], int(self.held_bytes[i]))
            for i in range(len(self.held_domain))
        ]


def arrange(documents: list[Document], ids: list[np.ndarray], seed: int) -> Tokens:
    """Splits documents into training and held-out ones, and shuffles the training documents."""
    kept = [i for i, d in enumerate(documents) if held_out(d)]
    trained = [i for i, d in enumerate(documents) if not held_out(d)]
    order = np.random.default_rng(seed).permutation(len(trained))
    return Tokens(
        train=np.concatenate([ids[trained[i]] for i in order]),
        held=np.concatenate([ids[i] for i in kept]) if kept else np.zeros(0, np.uint16),
        held_offsets=np.cumsum([0] + [len(ids[i]) for i in kept]).astype(np.int64),
        held_domain=np.asarray([DOMAINS.index(documents[i].domain) for i in kept], dtype=np.int64),
        held_bytes=np.asarray([len(documents[i].text.encode()) for i in kept], dtype=np.int64),
    )


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, offsets: int, count: int) -> tuple[int, np.ndarray]:
    """Returns the offset of an epoch's blocks and their order."""
    rng = np.random.default_rng((seed, epoch))
    return int(rng.integers(0, offsets)), rng.permutation(count)


def cut_block(row: np.ndarray, start: int, length: int, beginning: Sequence[int] = ()) -> np.ndarray:
    """Cuts a block out of a row, so that it begins as a prompt does.

    Args:
        row: Tokens [N], ~token for one without loss.
        start: First token of the block.
        length: Tokens per block, without the one that is only predicted.
        beginning: Special tokens before every prompt. If the block does not begin with them, they are put before it,
            without loss. A block that begins one token before them starts there.

    Returns:
        Tokens, int64 [length + 1].
    """
    size = len(beginning)
    for first in (start, start + 1) if size else (start,):
        block = row[first : first + length + 1].astype(np.int64)
        if len(block) == length + 1 and np.array_equal(np.where(block < 0, ~block, block)[:size], beginning):
            return block
    before = ~np.asarray(beginning, dtype=np.int64)
    return np.concatenate([before, row[start : start + length + 1 - size].astype(np.int64)])


def blocks(row: np.ndarray, step: int, count: int, length: int, seed: int, beginning: Sequence[int] = ()) -> Tensor:
    """Returns the blocks of a step. Every epoch visits each block once, with an order and an offset of its own.

    Args:
        row: Training tokens [N].
        step: Number of the step.
        count: Blocks per step.
        length: Tokens per block, without the one that is only predicted.
        seed: Seed of orders and offsets.
        beginning: Special tokens with which every block begins; see `cut_block`.

    Returns:
        Tokens, int64 [count, length + 1].
    """
    per_epoch = max((len(row) - 1) // length - 1, 1)
    picked = []
    for index in range(step * count, (step + 1) * count):
        epoch, place = divmod(index, per_epoch)
        offset, order = _epoch(seed, epoch, min(length, max(len(row) - length - 1, 1)), per_epoch)
        start = offset + int(order[place]) * length
        start = min(start, len(row) - length - 1)
        picked.append(cut_block(row, start, length, beginning))
    return torch.from_numpy(np.stack(picked))

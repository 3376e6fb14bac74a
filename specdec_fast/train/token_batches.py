"""Token arrays of the corpus, and batches that depend on the step number only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec_fast.train.demo_pair.corpus import DOMAINS, Document, held_out


@dataclass(frozen=True, slots=True)
class Tokens:
    """Encoded corpus: training tokens in one row, held-out documents apart with their domain and length in
    bytes.
    """

    train: np.ndarray  # uint16 [N], documents shuffled, each begins with the end token
    held: np.ndarray  # uint16 [H]
    held_offsets: np.ndarray  # int64 [documents + 1]
    held_domain: np.ndarray  # int64 [documents], index into DOMAINS
    held_bytes: np.ndarray  # int64 [documents]

    def save(self, path: Path) -> None:
        """Write to an .npz file."""
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Read what `save` wrote."""
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__slots__})

    def held_documents(self) -> list[tuple[str, np.ndarray, int]]:
        """Held-out documents: (domain, token ids [n], length in bytes)."""
        cuts = self.held_offsets
        return [
            (DOMAINS[int(self.held_domain[i])], self.held[cuts[i] : cuts[i + 1]], int(self.held_bytes[i]))
            for i in range(len(self.held_domain))
        ]


def arrange(documents: list[Document], ids: list[np.ndarray], seed: int) -> Tokens:
    """Split into training and held-out documents; the training documents are shuffled."""
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
    """The offset of an epoch's blocks, and their order."""
    rng = np.random.default_rng((seed, epoch))
    return int(rng.integers(0, offsets)), rng.permutation(count)


def blocks(row: np.ndarray, step: int, count: int, length: int, seed: int) -> Tensor:
    """The ``count`` blocks of ``length + 1`` tokens of this step, int64 [count, length + 1].

    Every epoch visits each block once, in an order of its own and from an offset of its own.
    """
    per_epoch = max((len(row) - 1) // length - 1, 1)
    picked = []
    for index in range(step * count, (step + 1) * count):
        epoch, place = divmod(index, per_epoch)
        offset, order = _epoch(seed, epoch, min(length, max(len(row) - length - 1, 1)), per_epoch)
        start = offset + int(order[place]) * length
        start = min(start, len(row) - length - 1)
        picked.append(row[start : start + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(picked))

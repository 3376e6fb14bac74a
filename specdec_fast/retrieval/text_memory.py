"""Texts of finished requests, counted in one tree and dropped in order of age. They can be saved and loaded.

Tests: tests/retrieval/test_text_memory.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec_fast.retrieval import file_format
from specdec_fast.retrieval.suffix_index import Grown, structures
from specdec_fast.retrieval.tokenizer_fingerprint import refuse_other_vocabulary

KIND = "suffix"


class TextMemory:
    """The newest texts, in a counted tree.

    Args:
        max_tokens: Capacity in tokens. The oldest texts are dropped first.
        depth: Longest string that is counted.

    Raises:
        ValueError: If a size is too small.
    """

    def __init__(self, max_tokens: int, depth: int = 48) -> None:
        if max_tokens < 1 or depth < 2:
            raise ValueError(
                f"memory of texts: got max_tokens {max_tokens} and depth {depth}; expected at least 1 and 2"
            )
        self.max_tokens, self.depth = max_tokens, depth
        self._tree = structures().CountedTree(depth)
        self._texts: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        """Stored tokens."""
        return len(self._tree)

    @property
    def texts(self) -> list[list[int]]:
        """The stored texts, the oldest first."""
        return [text for _, text in self._texts]

    def add(self, text: Sequence[int]) -> None:
        """Stores a text, or its end if it exceeds the capacity. The oldest texts make way."""
        kept = list(text[-self.max_tokens :])
        if not kept:
            return
        self._texts.append((self._tree.add(kept), kept))
        while len(self._tree) > self.max_tokens:
            self._tree.remove(self._texts.popleft()[0])

    def grow(
        self,
        context: Sequence[int],
        nodes: int,
        max_match: int,
        min_match: int,
        factor: float,
        min_probability: float,
        noise: tuple[int, int] | None = None,
    ) -> Grown:
        """Grows a tree of the continuations of a context's longest suffix that is stored (see suffix_index.py).

        Args:
            context: Newest tokens.
            nodes: Most nodes.
            max_match: Longest suffix.
            min_match: Shortest suffix.
            factor: Depth limit as a multiple of the match.
            min_probability: Paths with a smaller probability are dropped.
            noise: Seed and position of the root.

        Returns:
            Tokens, parents, sum of probabilities, and length of the match.
        """
        how = (max_match, nodes, min_match, factor, min_probability, noise)
        found: Grown = self._tree.grow(context[-max_match:], *how)
        return found

    def save(self, path: str | Path, vocabulary: str = "") -> None:
        """Writes the texts to a file, with the fingerprint of their tokenizer."""
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        tokens = np.array([token for text in self.texts for token in text], dtype=np.uint32)
        header = {"vocabulary": vocabulary, "texts": len(lengths), "tokens": len(tokens)}
        file_format.write(path, KIND, header, {"lengths": lengths, "tokens": tokens})

    def load(self, path: str | Path, vocabulary: str = "", vocab_size: int | None = None) -> None:
        """Adds the texts of a file, the oldest first.

        Args:
            path: The file.
            vocabulary: Expected fingerprint of the tokenizer. "": any.
            vocab_size: Expected vocabulary. None: any.

        Raises:
            ValueError: If the file is damaged, of another kind, or of another tokenizer.
            OSError: If it cannot be opened.
        """
        header, arrays = file_format.read(path, KIND)
        file_format.verify(path, header, arrays)
        refuse_other_vocabulary(path, header["vocabulary"], vocabulary)
        lengths, tokens = arrays["lengths"].tolist(), arrays["tokens"].tolist()
        if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
            raise ValueError(f"{path}: its lengths do not add up to its tokens; the file is damaged; make it again")
        if vocab_size is not None and max(tokens, default=0) >= vocab_size:
            raise ValueError(
                f"{path}: got token {max(tokens)}; expected ids below {vocab_size}; it belongs to another tokenizer"
            )
        start = 0
        for length in lengths:
            self.add(tokens[start : start + length])
            start += length

"""Identity of a vocabulary: its size, and a fingerprint that ties a file of tokens to a tokenizer.

Tests: tests/loading/test_tokenizers.py, tests/retrieval/test_text_memory.py.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """Returns a hash of a tokenizer's tokens and ids; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """Returns the largest id of a tokenizer + 1, since ids may have gaps; its length if it does not list tokens."""
    if not hasattr(tokenizer, "get_vocab"):
        return len(tokenizer)
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def refuse_other_vocabulary(path: object, theirs: str, ours: str) -> None:
    """Checks that a file was written with this tokenizer, unless one of the two is unknown. Raises ValueError."""
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"{path}: its tokens are those of another tokenizer (fingerprint {theirs[:8]}; expected the target's, "
            f"{ours[:8]}); make it again with the target's tokenizer"
        )

"""What a vocabulary is known by: its size, and a fingerprint that says which tokenizer a file of tokens belongs to.

Tests: tests/test_load_tokenizer.py, tests/retrieval/test_text_memory.py.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's tokens and their ids; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """The largest id of a tokenizer + 1 (ids may have gaps); its length, where it does not list its tokens."""
    if not hasattr(tokenizer, "get_vocab"):
        return len(tokenizer)
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def refuse_other_vocabulary(path: object, theirs: str, ours: str) -> None:
    """Raise ValueError where a file was written with another tokenizer (unless one of the two is unknown)."""
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"{path}: its tokens are those of another tokenizer (fingerprint {theirs[:8]}; expected the target's, "
            f"{ours[:8]}); make it again with the target's tokenizer"
        )

"""Which tokenizer a file of tokens belongs to: a fingerprint of the vocabulary. Tests: tests/stores/test_memory.py."""

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


def refuse_other_vocabulary(path: object, theirs: str, ours: str) -> None:
    """Raise ValueError where a file was written with another tokenizer (unless one of the two is unknown)."""
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"{path}: its tokens are those of another tokenizer (fingerprint {theirs[:8]}; expected the target's, "
            f"{ours[:8]}); make it again with the target's tokenizer"
        )

"""A small byte-level tokenizer made on the spot: every byte, a few pieces of several letters, one end-of-text
id.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PIECES = ("th", "he", "the", "in", "ing", "er", "ab", "bc", "END")
END_OF_TEXT = "<end>"


def _byte_alphabet() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, spare = {byte: chr(byte) for byte in printable}, 256
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(spare)
            spare += 1
    return [names[byte] for byte in range(256)]


@cache
def byte_tokenizer() -> Any:
    """A tokenizer of 266 ids; `byte_names[b]` is the token of byte b, the last id ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _byte_alphabet()
    vocab = {name: index for index, name in enumerate([*names, *PIECES, END_OF_TEXT])}
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("t", "he"),
        ("i", "n"),
        ("in", "g"),
        ("e", "r"),
        ("a", "b"),
        ("b", "c"),
    ]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END_OF_TEXT)
    made.byte_names = names
    return made

"""Small tokenizers without files: a byte-level one (every byte, a few longer pieces, one end-of-text id), and one that
falls back on bytes for text without pieces.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PIECES = ("th", "he", "the", "in", "ing", "er", "ab", "bc", "END")
END_OF_TEXT = "<end>"


def _byte_alphabet() -> list[str]:
    """The printable character for every byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, spare = {byte: chr(byte) for byte in printable}, 256
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(spare)
            spare += 1
    return [names[byte] for byte in range(256)]


@cache
def byte_tokenizer() -> Any:
    """Returns a tokenizer of 266 ids; `byte_names[b]` is the token of byte b, and the last id ends texts."""
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


LETTERS = "abcdefghijklmnopqrstuvwxyz.:!"


@cache
def fallback_tokenizer() -> Any:
    """Returns a tokenizer that decodes like those of Llama 2, Mistral 7B and Gemma: letters with and without a space
    before them, all else by bytes. An invalid run of bytes is lost.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *LETTERS, *(f"▁{letter}" for letter in LETTERS)]
    inner = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], byte_fallback=True))
    space = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([space[0], decoders.ByteFallback(), decoders.Fuse(), space[1]])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def fallback_ids(text: str) -> list[int]:
    """A token for each letter, with the space before it, and for each byte of everything else."""
    found: list[str] = []
    for character in text:
        if character in LETTERS:
            found[-1:] = [f"▁{character}"] if found[-1:] == ["▁"] else [*found[-1:], character]
        else:
            found += ["▁"] if character == " " else [f"<0x{byte:02X}>" for byte in character.encode()]
    return [fallback_tokenizer().convert_tokens_to_ids(name) for name in found]

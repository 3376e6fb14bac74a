"""Prompts: text, token ids in the forms in which tokenizers return them, and special tokens around text.

Tests: tests/engine/test_prompts.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from specdec_fast.core.remedies import RefusedError, Remedy


class Array(Protocol):
    """A tensor of PyTorch, an array of NumPy, or the like."""

    def tolist(self) -> Any:
        """Returns the values as nested lists."""
        ...


Prompt = str | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any] | Array
"""Text; token ids as a sequence, tensor or array, [n] or [1, n]; or a mapping with `input_ids`."""
Prompts = Iterable[Prompt] | Mapping[str, Any]
"""A batch: an iterable of prompts, a tensor or array [prompts, n], or a mapping with such `input_ids`."""

_FORMS = "text or a sequence of token ids"
_WITHOUT_EFFECT = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length"}
"""What tokenizers return besides ids and mask; text alone has no use for it."""
_MOST_ADDED = 4
"""Most special tokens that a tokenizer is expected to put before a text."""
PROBED = 16
"""Characters per token of the limit that `describe_excess` encodes first. Most texts have 2 to 5 per token."""


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int, add_special_tokens: bool | None = None) -> list[int]:
    """Converts a prompt to token ids.

    Args:
        prompt: The prompt.
        tokenizer: A transformers tokenizer, which text needs, or None.
        vocab_size: V of the target.
        add_special_tokens: Whether the tokenizer adds special tokens to text. None: as the tokenizer does by default,
            but not those with which the text begins already.

    Returns:
        At least one token id.

    Raises:
        ValueError: If the prompt is empty or cannot be converted, or if an id is outside of the vocabulary.
        RefusedError: For text without a tokenizer.
    """
    if add_special_tokens not in (None, True, False):
        raise ValueError(f"add_special_tokens: got {add_special_tokens!r}; expected True, False or None")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RefusedError("prompt: got text and an engine without a tokenizer", Remedy.TOKENIZER_OR_IDS)
        try:
            tokens = _encode_text(prompt, tokenizer, add_special_tokens)
        except Exception as error:
            raise ValueError(
                f"prompt: got {prompt!r:.60}, which the tokenizer cannot encode ({type(error).__name__}: {error}); "
                "expected Unicode text without lone surrogates; repair it, or pass token ids"
            ) from error
    else:
        rows = read_rows(prompt)
        if len(rows) != 1:
            advice = "; generate takes several prompts" if rows else ""
            raise ValueError(f"prompt: got {len(rows)} rows of token ids; expected one{advice}")
        tokens = rows[0]
    if not tokens:
        raise ValueError("prompt: got no tokens; expected at least one")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt: got token id {bad}; expected 0..{vocab_size - 1}; is this the target's tokenizer?")
    return tokens


def _encode_text(text: str, tokenizer: Any, add_special_tokens: bool | None) -> list[int]:
    """Encodes text. By default the beginning that a tokenizer adds is dropped if the text has it already."""
    if add_special_tokens is not None:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    tokens = list(tokenizer.encode(text))
    if not any(tokens[:size] == tokens[size : 2 * size] != [] for size in range(1, _MOST_ADDED + 1)):
        return tokens
    bare = list(tokenizer.encode(text, add_special_tokens=False))
    added = _count_added(tokens, bare)
    return tokens[added:] if bare[:added] == tokens[:added] else tokens


def describe_excess(text: str, tokenizer: Any, limit: int) -> str | None:
    """Returns how long a text is, in words, if it has far more tokens than a limit; None if it may fit.

    The cost grows with the limit and not with the text, for the beginning of a text alone is encoded. Its tokens must
    be twice as many as the limit, since the cut changes some of them. A beginning with few tokens, such as blanks that
    a tokenizer drops, proves nothing. Then a longer one is encoded.

    Args:
        text: The text.
        tokenizer: A transformers tokenizer.
        limit: Most tokens.
    """
    size = PROBED * limit
    while size < len(text):
        try:
            count = len(tokenizer.encode(text[:size], add_special_tokens=False))
        except Exception:  # encoding the whole text says why
            return None
        if count > 2 * limit:
            return f"got {len(text)} characters, the first {size} of which are {count} tokens"
        size *= 2
    return None


def added_beginning(tokenizer: Any) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text: those with which prompts begin.

    Args:
        tokenizer: A transformers tokenizer.

    Returns:
        Token ids, such as the beginning of sequence; empty if the tokenizer adds nothing.
    """
    text = "a"
    tokens, bare = (list(tokenizer.encode(text, **how)) for how in ({}, {"add_special_tokens": False}))
    return tokens[: _count_added(tokens, bare)]


def _count_added(tokens: list[int], bare: list[int]) -> int:
    """Returns how many tokens are before a text, given its tokens with special tokens and without."""
    sizes = range(len(tokens) - len(bare), 0, -1)
    return next((size for size in sizes if tokens[size : size + len(bare)] == bare), 0)


def read_rows(prompt: Any) -> list[list[int]]:
    """Reads token ids: a sequence, tensor or array, [n] or [rows, n], or a mapping as tokenizers return it.

    Args:
        prompt: The ids.

    Returns:
        One list for each row, without the padding that an attention mask shows.

    Raises:
        ValueError: For anything else.
    """
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt)
    try:
        return _rows(prompt)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # tensors without values raise the last ones
        raise ValueError(f"prompt: got {prompt!r:.60}; expected {_FORMS}") from None


def _rows(given: Any) -> list[list[int]]:
    """Converts ids of any integer type. Raises TypeError for anything else, bytes and booleans included."""
    entries = list(_plain(given))
    if entries and all(map(_is_row, entries)):
        return [_integers(_plain(entry)) for entry in entries]
    return [_integers(entries)]


def _is_row(entry: Any) -> bool:
    return isinstance(entry, list | tuple) or getattr(entry, "ndim", 0) > 0


def _plain(given: Any) -> Any:
    """Returns nested lists of a tensor or array, which are read at once."""
    if isinstance(given, bytes | bytearray | str):
        raise TypeError
    return given.tolist() if hasattr(given, "tolist") else given


def _integers(entries: Iterable[Any]) -> list[int]:
    entries = list(entries)
    if bool in set(map(type, entries)):
        raise TypeError
    return [*map(operator.index, entries)]


def _read_mapping(given: Mapping[str, Any]) -> list[list[int]]:
    """Reads what a tokenizer returns. Raises ValueError for what the engine cannot read."""
    names = ", ".join(map(str, given))
    if "input_ids" not in given:
        raise ValueError(f"prompt: got a mapping of {names:.60}; expected input_ids, as a tokenizer returns them")
    unread = given.keys() - _WITHOUT_EFFECT - {"input_ids", "attention_mask"}
    if unread:
        raise ValueError(
            f"prompt: got {min(map(str, unread))} beside input_ids; expected token ids of text alone; drop it"
        )
    rows, mask = read_rows(given["input_ids"]), given.get("attention_mask")
    if mask is None:
        return rows
    masks = read_rows(mask)
    if [*map(len, masks)] != [*map(len, rows)]:
        raise ValueError("prompt: got an attention_mask of another shape than input_ids; expected the same shape")
    return [_without_padding(row, own) for row, own in zip(rows, masks)]


def _without_padding(row: list[int], mask: list[int]) -> list[int]:
    """Drops what a mask hides before and behind a text."""
    seen = [at for at, each in enumerate(mask) if each]
    first, last = (seen[0], seen[-1] + 1) if seen else (0, 0)
    if len(seen) != last - first:
        raise ValueError("prompt: got an attention_mask with gaps; expected padding before or behind the text alone")
    return row[first:last]


def split_prompts(prompts: Any) -> list[Any]:
    """Splits a batch into its prompts.

    Args:
        prompts: An iterable of prompts, a tensor or array [prompts, n], or a mapping with such `input_ids`.

    Returns:
        The prompts.

    Raises:
        ValueError: For a single prompt.
    """
    if isinstance(prompts, str | bytes):
        raise ValueError(f"prompts: got one text, {prompts!r:.60}; expected a list of prompts; pass [text]")
    if isinstance(prompts, Mapping):
        return list(read_rows(prompts))
    try:
        found = list(prompts)
    except TypeError:
        raise ValueError(f"prompts: got {prompts!r:.60}; expected a list of prompts") from None
    if found and all(_is_integer(each) and not _is_row(each) for each in found):
        raise ValueError("prompts: got the token ids of one prompt; expected a list of prompts; put it into a list")
    return found


def _is_integer(entry: Any) -> bool:
    try:
        operator.index(entry)
    except (TypeError, RuntimeError):
        return False
    return True

"""Loads and compares tokenizers, and finds the ids that end a text. Tests: tests/test_load_tokenizer.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.loading.models import BUNDLED, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER_FILE = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|tekken\.json|bpe\.codes|.*\.(model|spm|tiktoken)")
_HUB_FILES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"


def lacks_tokenizer(source: str | Path) -> bool:
    """Returns whether a source is a folder without any file of a tokenizer."""
    place = Path(BUNDLED.get(str(source), source))
    return place.is_dir() and not any(_TOKENIZER_FILE.fullmatch(file.name) for file in place.iterdir())


def _came_from_hub(source: str) -> bool:
    """Whether the local hub cache has a file of this tokenizer."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(source, name), str) for name in _HUB_FILES)
    except HFValidationError:  # no valid hub id
        return False


def load_tokenizer(source: str | Path) -> Any:
    """Loads the tokenizer of a model.

    Args:
        source: A bundled name, a folder, or a hub id.

    Returns:
        The tokenizer. None if the folder has no file of one, or if the hub has none.

    Raises:
        ValueError: If the files of a tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    place = Path(BUNDLED.get(str(source), source))
    is_folder = place.is_dir()
    if lacks_tokenizer(place):
        return None
    try:
        found = AutoTokenizer.from_pretrained(place if is_folder else source)
        # for some kinds of models transformers makes an empty tokenizer with special tokens alone
        special = {*found.all_special_tokens}
        return found if any(token not in special for token in found.get_vocab()) else None
    except Exception as error:
        if not (is_folder or _came_from_hub(str(source))) and isinstance(
            error, (OSError, ValueError, KeyError, TypeError)
        ):
            return None
        raise ValueError(
            f"tokenizer: got {str(source)!r}, whose tokenizer cannot be read ({type(error).__name__}: "
            f"{first_line(error)}); expected files as transformers writes them; restore the broken files, or remove "
            "them and pass token ids"
        ) from error


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Checks that two tokenizers give the same ids to the same tokens.

    Args:
        target: The target's tokenizer, or None, which passes.
        draft: The draft model's tokenizer, or None, which passes.

    Raises:
        ValueError: If a token has another id.
    """
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    raise ValueError(
        f"draft: its tokenizer differs from the target's: {len(different)} of {len(ours)} tokens have other ids "
        f"(for example {sorted(different)[0]!r}); expected the same vocabulary; choose a draft of the same model "
        "family, or drafter draft_model with its option tokenizers=tli or tokenizers=slem"
    )


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of a model.

    Args:
        model: A transformers model. Its generation config counts first, then its config.
        tokenizer: Its tokenizer, which counts last, or None.
    """
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()

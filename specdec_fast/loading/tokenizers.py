"""Loads and compares tokenizers, and finds the ids that end a text. Tests: tests/loading/test_tokenizers.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_fast.loading.error_text import first_line
from specdec_fast.loading.gguf_reader import fetch_gguf, gguf_value, open_gguf, shared_gguf_reading
from specdec_fast.loading.model_options import ModelOptions
from specdec_fast.loading.model_sources import ModelSource, base_of_adapter, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER_FILE = re.compile(r"tokenizer.*|vocab\..*|merges\.txt|tekken\.json|bpe\.codes|.*\.(model|spm|tiktoken)")
_HUB_FILES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"


def lacks_tokenizer(source: str | Path) -> bool:
    """Returns whether a source is a folder without any file of a tokenizer."""
    try:
        found = resolve_source(source, "tokenizer")
    except ValueError:
        return False
    return found.gguf_file is None and not found.is_adapter and _has_no_file(found)


def lacks_chat_template(source: str | Path, options: ModelOptions | None = None) -> bool:
    """Returns whether a model has a tokenizer without a chat template. Its weights are not read.

    Args:
        source: A bundled name, a folder, a GGUF file or a hub id. Nothing is looked up on the hub.
        options: Options with which the model is loaded.

    Returns:
        True if that is certain. False if there is a template or no tokenizer, or if files are not here or not readable.
    """
    try:
        found = resolve_source(source, "tokenizer")
        if not found.is_local:
            return False
        if found.gguf_file is None:
            tokenizer = load_tokenizer(source, options)
            return tokenizer is not None and not getattr(tokenizer, "chat_template", None)
        return not gguf_value(open_gguf(Path(found.place) / found.gguf_file, "tokenizer"), "tokenizer.chat_template")
    except ValueError:
        return False


def _has_no_file(source: ModelSource) -> bool:
    """Whether a source is a folder without any file of a tokenizer."""
    return source.is_local and not any(_TOKENIZER_FILE.fullmatch(file.name) for file in Path(source.place).iterdir())


def _came_from_hub(source: ModelSource) -> bool:
    """Whether the local hub cache has a file of this tokenizer."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if source.is_local:
        return False
    try:
        return any(isinstance(try_to_load_from_cache(str(source.place), name), str) for name in _HUB_FILES)
    except HFValidationError:  # no valid hub id
        return False


def load_tokenizer(source: str | Path, options: ModelOptions | None = None) -> Any:
    """Loads the tokenizer of a model.

    Args:
        source: A bundled name, a folder, a GGUF file, a hub id, or the folder of a PEFT adapter. An adapter without a
            tokenizer has that of its model.
        options: Options with which the model is loaded.

    Returns:
        The tokenizer. None if the folder has no file of one, or if the hub has none.

    Raises:
        ValueError: If the files of a tokenizer cannot be read.
    """
    found, options = resolve_source(source, "tokenizer"), options or ModelOptions()
    if found.gguf_file is None and _has_no_file(found):
        return load_tokenizer(base_of_adapter(found, "tokenizer"), options) if found.is_adapter else None
    remedy = "restore the broken files, or remove them and pass token ids"
    if found.gguf_file is not None:
        remedy = "pass tokenizer= with the folder or hub id of the original model"
    try:
        tokenizer = _load(found, options)
        # for some kinds of models transformers makes an empty tokenizer with special tokens alone
        special = {*tokenizer.all_special_tokens}
        return tokenizer if any(token not in special for token in tokenizer.get_vocab()) else None
    except Exception as error:
        if str(error).startswith("tokenizer: got"):  # it names the file already
            raise
        is_file = found.is_local or found.gguf_file is not None
        if not (is_file or _came_from_hub(found)) and isinstance(error, (OSError, ValueError, KeyError, TypeError)):
            return None
        if "trust_remote_code" in str(error):
            remedy = "pass trust_remote_code=True, which runs the Python code that comes with them, or pass token ids"
        raise ValueError(
            f"tokenizer: got {found.name!r}, whose tokenizer cannot be read ({type(error).__name__}: "
            f"{first_line(error)}); expected files as transformers writes them; {remedy}"
        ) from error


def _load(source: ModelSource, options: ModelOptions) -> Any:
    """Loads a tokenizer with transformers."""
    from transformers import AutoTokenizer

    files = options.for_files()
    if source.gguf_file is None:
        return AutoTokenizer.from_pretrained(source.place, **files)
    with shared_gguf_reading():
        trust = files.pop("trust_remote_code")
        path = fetch_gguf(source, files)
        reader = open_gguf(path, "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=trust)
        begins = bool(gguf_value(reader, "tokenizer.ggml.add_bos_token")) and tokenizer.bos_token_id is not None
        if begins and tokenizer("a").input_ids[:1] != [tokenizer.bos_token_id]:
            raise ValueError(
                "its header asks for a beginning of sequence, which this release of transformers leaves out; update "
                "transformers to 5.23"
            )
        return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """Checks a tokenizer that was passed as an object.

    Raises:
        ValueError: If it is no tokenizer of transformers, nor an object with the same methods.
    """
    counts = hasattr(tokenizer, "get_vocab") or hasattr(tokenizer, "__len__")
    is_raw = type(tokenizer).__module__.partition(".")[0] == "tokenizers"  # its methods return other types
    if counts and not is_raw:
        return
    remedy = "load one with AutoTokenizer.from_pretrained"
    if hasattr(tokenizer, "tokenizer"):  # a processor
        remedy = "pass its attribute tokenizer"
    elif is_raw:
        remedy = "pass PreTrainedTokenizerFast(tokenizer_object=...)"
    raise ValueError(f"tokenizer: got {type(tokenizer).__name__}; expected a tokenizer of transformers; {remedy}")


def check_same_tokenizer(target: Any, draft: Any, vocab_size: int | None = None) -> None:
    """Checks that two tokenizers give the same ids to the same tokens.

    Args:
        target: The target's tokenizer, or None, which passes.
        draft: The draft model's tokenizer, or None, which passes.
        vocab_size: Ids that the target generates. Tokens of others, which some converters add, do not count. None
            counts all.

    Raises:
        ValueError: If a token has another id.
    """
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    if vocab_size is not None:
        ours, theirs = ({token: id for token, id in each.items() if id < vocab_size} for each in (ours, theirs))
    every = ours.keys() | theirs.keys()
    different = [token for token in every if ours.get(token) != theirs.get(token)]
    if not different:
        return
    raise ValueError(
        f"draft: its tokenizer differs from the target's: {len(different)} of {len(every)} tokens have other ids "
        f"(for example {min(different)!r}); expected the same vocabulary; choose a draft of the same model "
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

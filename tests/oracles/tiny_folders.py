"""A tiny Llama in a folder, whose tokenizer puts a beginning of sequence before every text, as Gemma's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec_fast.targets.tiny_models import tiny_model

BEGIN, END = 0, 1
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
"""Template of the tokenizer; the tokens of < and > are around each message."""


def letters_with_beginning() -> Any:
    """Returns a tokenizer of printable ASCII, one token a letter, with a beginning of sequence."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<begin>": BEGIN, "<end>": END} | {chr(32 + at): at + 2 for at in range(94)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: Path, **shape: Any) -> str:
    """Writes model and tokenizer into a folder.

    Args:
        folder: The folder.
        **shape: Fields of the model's configuration.

    Returns:
        The folder's path.
    """
    model = tiny_model("llama", **shape)
    assert model.config.vocab_size == 96
    model.save_pretrained(folder)
    letters_with_beginning().save_pretrained(folder)
    return str(folder)

"""Trains and loads the demo pair's tokenizer, a byte-level BPE that represents every text without loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdec_fast.train.demo_pair.corpus import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 1024


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY, context: int = 2048) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer.

    Args:
        texts: Training documents.
        size: Entries of the vocabulary.
        context: Maximum length that the tokenizer reports.

    Returns:
        The tokenizer. Id 0 begins, ends and separates documents.

    Source:
        Sennrich et al. 2016 (arXiv:1508.07909), on bytes as in GPT-2.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    # A run of spaces is one piece, a word has at most one leading space, and every digit is a piece.
    pieces = Regex(r"\n+|[ \t]+(?=[ \t]\S|\n)|[ \t]+(?![^\s])| ?\p{L}+|\d| ?[^\s\p{L}\d]+|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[np.ndarray]:
    """Returns the token ids of each document, uint16, with the end token first."""
    batches = tokenizer([d.text for d in documents], add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [np.asarray([end, *ids], dtype=np.uint16) for ids in batches]

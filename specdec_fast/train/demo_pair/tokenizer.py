"""Train and load the demo pair's tokenizer: byte-level BPE, so every text is representable and lossless."""

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
    """A byte-level BPE tokenizer of exactly ``size`` entries; id 0 begins, ends and separates documents.

    Sennrich et al. 2016 (arXiv:1508.07909), on bytes as in GPT-2.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    # Runs of spaces (indentation) are one piece; a word takes one leading space; digits stay apart.
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
    """The tokenizer saved in ``folder``."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[np.ndarray]:
    """Token ids of each document, uint16, the end token first."""
    batches = tokenizer([d.text for d in documents], add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [np.asarray([end, *ids], dtype=np.uint16) for ids in batches]

"""Training text from files: documents become tokens, and a part is held out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdec_fast.loading import load_tokenizer
from specdec_fast.train.heads.training_texts import make_token_row, read_token_row, split


def test_text_from_files_and_columns(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    tokenizer = load_tokenizer("demo-target")
    (tmp_path / "a.txt").write_text("In the beginning")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "was the word"}) + "\n\n")
    parquet.write_table(pyarrow.table({"body": ["and", None, "the end"]}), tmp_path / "c.parquet")
    found = read_token_row([tmp_path], "body", tokenizer)
    texts = ["In the beginning", "was the word", "and", "the end"]
    assert found.tolist() == [token for text in texts for token in [tokenizer.eos_token_id, *tokenizer.encode(text)]]
    with pytest.raises(ValueError, match=r"b\.jsonl:1: expected a JSON object with text in 'text'; see --field"):
        read_token_row([tmp_path / "b.jsonl"], "text", tokenizer)
    with pytest.raises(ValueError, match="got no documents"):
        make_token_row([], tokenizer)


def test_text_that_is_too_short_is_refused() -> None:
    row, held = split(np.arange(1000), 24)
    assert len(row) + len(held) == 1000 and held[0] == row[-1] + 1 and len(held) == 31
    with pytest.raises(ValueError, match="got 60 tokens; expected at least 99 for blocks of 24"):
        split(np.arange(60), 24)

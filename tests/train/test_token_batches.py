"""Blocks of training tokens: they begin as prompts do, and keep their length and their loss mask."""

from __future__ import annotations

import numpy as np
import torch

from specdec_fast.train.token_batches import blocks, cut_block


def test_a_block_begins_as_a_prompt_does() -> None:
    row = np.asarray([9, 1, 20, 21, 22, 9, 1, 30, 31, 32, 33], dtype=np.int32)  # 9 ends a text, 1 begins one
    for start, want in (
        (3, [~1, 21, 22, 9, 1]),  # inside a text
        (1, [1, 20, 21, 22, 9]),  # it has it
        (5, [1, 30, 31, 32, 33]),  # behind the end of a text
        (6, [1, 30, 31, 32, 33]),
    ):
        assert cut_block(row, start, 4, [1]).tolist() == want
        assert cut_block(row, start, 4).tolist() == row[start : start + 5].tolist()
    assert cut_block(np.asarray([~1, ~20, 21]), 0, 2, [1]).tolist() == [~1, ~20, 21], "a prompt without loss"
    assert cut_block(row, 2, 4, [7, 8]).tolist() == [~7, ~8, 20, 21, 22]
    assert cut_block(np.asarray([9, 1, 20]), 0, 2, [1]).tolist() == [~1, 9, 1], "the row ends"


def test_all_blocks_of_a_step_begin_alike() -> None:
    row = np.arange(2, 500, dtype=np.int32)
    found, plain = blocks(row, 3, 4, 16, 0, [1]), blocks(row, 3, 4, 16, 0)
    assert found.shape == (4, 17) and found[:, 0].tolist() == [~1] * 4
    assert torch.equal(found[:, 1:], plain[:, :-1])

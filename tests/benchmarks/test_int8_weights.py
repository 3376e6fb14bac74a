"""The benchmark of int8 weights: its rows, and the committed result."""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch

from benchmarks import int8_weights
from specdec_fast.loading import load_model


def test_rows_compare_with_float32_in_the_same_round() -> None:
    clock = count()  # every generation takes one tick
    rows = int8_weights.measure("demo-draft", "Once upon a time. " * 40, 96, 2, [1], 2, lambda: float(next(clock)))
    assert [row["variant"] for row in rows] == list(int8_weights.VARIANTS)
    assert all((row["speed_vs_float32"], row["tokens_per_second"], row["threads"]) == (1, 2, 1) for row in rows)
    first, *others = rows
    assert first["perplexity_change_percent"] == 0 and first["scored_tokens"] == 96
    assert all(0 < abs(row["perplexity_change_percent"]) < 20 for row in others)


def test_perplexity_is_that_of_the_loss_of_transformers() -> None:
    model, tokens = load_model("demo-draft"), torch.arange(5, 105)
    with torch.inference_mode():
        loss = model(tokens[None], labels=tokens[None]).loss
    assert int8_weights.perplexity(model, tokens) == pytest.approx(float(loss.exp()), rel=1e-4)


def test_the_committed_result_is_complete_and_names_no_folders() -> None:
    rows = json.loads((int8_weights.RESULTS / int8_weights.TABLE).read_text())["rows"]
    for model, threads in {(row["model"], row["threads"]) for row in rows}:
        own = {row["variant"] for row in rows if (row["model"], row["threads"]) == (model, threads)}
        assert own == set(int8_weights.VARIANTS) and "/" not in model

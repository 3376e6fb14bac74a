"""The memory of a training step: what is surely needed is compared with what is free."""

from __future__ import annotations

import pytest
import torch
from oracles.small_heads import HEADS, some_heads, tiny

from specdec_fast.train.heads import memory_estimate
from specdec_fast.train.heads.memory_estimate import available_bytes, least_bytes, memory_note
from specdec_fast.train.heads.parallel import ParallelHeadsTrainee
from specdec_fast.train.heads.recurrent import FINAL, Eagle3Trainee, EagleTrainee, new_eagle, new_eagle3
from specdec_fast.train.heads.settings import Settings
from specdec_fast.train.heads.target_states import TargetStates

SETTINGS = Settings(batch=3, length=20)


def test_the_bound_counts_weights_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = tiny()
    rows = model.get_output_embeddings().weight.shape[0]
    parallel = ParallelHeadsTrainee(some_heads(model), states)
    weights = sum(each.numel() for each in parallel.parameters())
    assert least_bytes(parallel, SETTINGS) == 16 * weights + 8 * HEADS * rows * 60
    assert EagleTrainee(new_eagle(model), TargetStates(model, (FINAL,))).logits_per_token == 2 * rows
    head = new_eagle3(model, torch.arange(30), [0, 1, 1])
    seen = TargetStates(model, tuple(dict.fromkeys((*head.aux_hidden_states, FINAL))))
    assert Eagle3Trainee(head, seen, ahead=5).logits_per_token == rows + 5 * 30
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _: least_bytes(parallel, SETTINGS))
    assert memory_note(parallel, SETTINGS, cpu) is None
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _: least_bytes(parallel, SETTINGS) - 1)
    assert "lower --batch or --length" in str(memory_note(parallel, SETTINGS, cpu))
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _: None)
    assert memory_note(parallel, SETTINGS, cpu) is None


def test_the_free_memory_is_read() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50

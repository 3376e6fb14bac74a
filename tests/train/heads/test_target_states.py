"""Hidden states for training equal those of the engine."""

from __future__ import annotations

import pytest
import torch
from oracles import models

from specdec_fast.train.heads.trainer import TargetStates


def test_states_equal_the_auxiliary_hidden_states_of_the_engine() -> None:
    places = ("entering:0", "entering:1", "final_norm")
    target = models.target("llama", max_rows=1)
    tokens = torch.tensor(models.prompt(17))
    offsets, rows = torch.tensor([0, 17], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    target.cache.reserve(0, 17)
    want = target.extend(rows, tokens, offsets, logits=False, aux_hidden_states=places).aux_hidden_states
    found = TargetStates(models.own("llama"), places)(tokens[None])
    for place in places:
        torch.testing.assert_close(found[place][0], want[place], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match="auxiliary hidden state: got 'entering:9'; expected 'final_norm' or 'entering:i' with i <"
    ):
        TargetStates(models.own("llama"), ("entering:9",))

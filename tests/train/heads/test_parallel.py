"""Losses and acceptance rates of parallel heads equal their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.small_heads import HEADS, row_of, some_heads, tiny
from torch import nn

from specdec_fast.train.heads.parallel import ParallelHeadsTrainee, measure_rank_rates


@pytest.mark.parametrize("labels", ["text", "target"])
@pytest.mark.parametrize(("own", "prompt"), [(True, 0), (False, 0), (True, 5)])
def test_the_loss_is_that_of_its_definition(labels: str, own: bool, prompt: int) -> None:
    """Head k at place t against the token t + 2 + k, or the target's distribution at place t + 1 + k, place by place;
    where the first tokens of a text do not count they are no labels.
    """
    model, states = tiny()
    heads = some_heads(model, own_lm_head=own)
    trainee = ParallelHeadsTrainee(heads, states, decay=0.8, labels=labels)
    tokens = torch.from_numpy(row_of(22).astype(np.int64)).reshape(2, 11)
    with torch.no_grad():
        found, measures = trainee(torch.cat([~tokens[:, :prompt], tokens[:, prompt:]], 1))
        output = model(tokens, output_hidden_states=True)
        hidden = output.hidden_states[-1]  # behind the last norm
        want, hits = 0.0, []
        for head in range(HEADS):
            parts, right = [], []
            for text in range(2):
                for place in range(max(prompt - 2 - head, 0), 11 - 2 - head):
                    x = hidden[text, place]
                    x = x + nn.functional.silu(heads.weight[0, head] @ x + heads.bias[0, head])
                    matrix = heads.lm_head[head] if own else model.get_output_embeddings().weight
                    scores = (matrix @ x).log_softmax(-1)
                    token = int(tokens[text, place + 2 + head])
                    dist = output.logits[text, place + 1 + head].softmax(-1)
                    parts.append(-scores[token] if labels == "text" else -(dist * scores).sum())
                    right.append((text, place, int(scores.argmax()) == token))
            want += 0.8**head * float(torch.stack(parts).mean())
            hits.append(right)
    assert float(found) == pytest.approx(want, rel=1e-4)
    for head in range(HEADS):
        share = sum(right for *_, right in hits[head]) / len(hits[head])
        assert float(measures[f"head_{head + 1}"]) == pytest.approx(share)
    walks = {(text, place) for text in range(2) for place in range(max(prompt - 2, 0), 11 - 1 - HEADS)}
    known = [{(text, place): right for text, place, right in each} for each in hits]
    chain = 1 + sum(
        sum(all(known[below][walk] for below in range(head + 1)) for walk in walks) / len(walks)
        for head in range(HEADS)
    )
    assert float(measures["tokens_per_step"]) == pytest.approx(chain)


@pytest.mark.parametrize("prompt", [0, 9])
def test_rates_by_rank_are_counts(prompt: int) -> None:
    model, states = tiny()
    trainee = ParallelHeadsTrainee(some_heads(model), states)
    held = row_of(41)
    rates = measure_rank_rates(trainee, np.concatenate([~held[:prompt], held[prompt:]]), 20, width=40)
    hits, places = np.zeros((HEADS, 40)), np.zeros((HEADS, 1))
    for start in (0, 20):
        tokens = torch.from_numpy(held[start : start + 21].astype(np.int64))[None]
        with torch.no_grad():
            logits, _ = trainee.logits(tokens)
        for head in range(HEADS):
            for place in range(max(prompt - 2 - head - start, 0), 21 - 1 - HEADS):
                places[head] += 1
                order = logits[head, 0, place].argsort(descending=True, stable=True).tolist()
                rank = order.index(int(tokens[0, place + 2 + head]))
                if rank < 40:
                    hits[head, rank] += 1
    assert np.allclose(rates, hits / places)

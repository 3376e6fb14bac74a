"""Log-probabilities of emitted tokens: those of the target's distribution, with and without speculation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.processed_decoding import processed_dist
from oracles.sampled_chain import SampledChain

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.sampling.logprobs import token_logprobs
from specdec_kernels import distribution_stats

VOCAB, STATES = 9, 17
CHANGES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "top_k": 6, "banned_token_ids": (2,)}


def target() -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=5))


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "token"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_emitted_token_has_the_target_s_probability(kind: str, temperature: float) -> None:
    model, prompts = target(), [[1], [2, 3, 2], [4, 4]]
    counts = (3, 0, None)
    wanted = [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=15, logprobs=count, **CHANGES)
        for at, count in enumerate(counts)
    ]
    plain = Engine(model).generate(prompts, wanted)
    texts = [[*prompt, *handle.tokens] for prompt, handle in zip(prompts, plain, strict=True)]
    drafter: Any = {
        "plain": None,
        "chain": NoisyChain(texts, 0.8, VOCAB, 5),
        "tree": NoisyTree(texts, 0.8, VOCAB, 9),
        "token": SampledChain(lambda text: torch.from_numpy(model.logits_after(text)).float(), 3),
    }[kind]
    engine = Engine(model, drafter, rule="rejection" if kind == "rejection" else "best")
    handles = engine.generate(prompts, wanted)
    assert handles[2].logprobs == [] and "logprobs" not in handles[2].as_dict()
    for prompt, own, handle, count in zip(prompts, wanted, handles, counts[:2], strict=False):
        assert count is not None and [each.token for each in handle.logprobs] == handle.tokens
        for at, each in enumerate(handle.logprobs):
            # at temperature 0 the distribution is a point: the softmax of the processed logits is reported
            text = [*prompt, *handle.tokens[:at]]
            shown = own if temperature else SamplingParams(temperature=1.0, **(CHANGES | {"top_k": 0}))
            weights = processed_dist(model.logits_after(text), shown, prompt, handle.tokens[:at])
            assert each.logprob == pytest.approx(math.log(weights[each.token]), abs=1e-4)
            order = sorted(np.flatnonzero(weights), key=lambda token: (-weights[token], token))[:count]
            assert [token for token, _ in each.top] == order
            assert [p for _, p in each.top] == pytest.approx(np.log(weights[order]).tolist(), abs=1e-4)
        assert handle.as_dict()["logprobs"][0].keys() == {"token", "logprob", "top"}
    if kind != "plain":
        assert engine.stats.tau > 1.3


def test_tokens_of_probability_zero_are_not_alternatives() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    stats = distribution_stats(
        logits, torch.ones(1), torch.tensor([2], dtype=torch.int32), torch.ones(1), torch.zeros(1)
    )
    (found,) = token_logprobs(TokenDistributions(logits, *stats), [0], [0], 9)
    assert found.logprob == -math.inf and [token for token, _ in found.top] == [1, 3]
    assert sum(math.exp(p) for _, p in found.top) == pytest.approx(1.0)
    assert token_logprobs(TokenDistributions(logits, *stats), [0], [], 3) == []


def test_a_stop_inside_an_accepted_run_cuts_logprobs_too() -> None:
    model = target()
    text = Engine(model).generate([[1]], SamplingParams(temperature=0, max_new_tokens=12))[0].tokens
    drafter = NoisyChain([[1, *text]], 1.0, VOCAB, num_draft_tokens=8)
    end = text[4]
    handle = Engine(model, drafter, eos_token_ids=[end]).generate(
        [[1]], SamplingParams(temperature=0, max_new_tokens=12, logprobs=1)
    )[0]
    assert [each.token for each in handle.logprobs] == handle.tokens == text[: text.index(end) + 1]

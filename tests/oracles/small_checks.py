"""Small versions of the engine's checks, which mutants must fail.

Each raises `Noticed` if it detects an error.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.rules.rejection as token_module
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.noisy_oracle import NoisyChain, NoisyTree, PausingChain
from oracles.plain_decoding import plain_decode
from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_kernels import distribution_stats

VOCAB, STATES = 5, 7
PROMPT = [1, 3]


def target(rows: int = 8, **shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=1, std=1.5), max_rows=rows, page_size=4, **shape)


def drafter(rows: int, pick: str) -> Any:
    logits = 0.5 * random_logits(STATES, VOCAB, seed=1) + 0.5 * random_logits(STATES, VOCAB, seed=6)
    return get_drafter("draft_model")(AutomatonTarget(logits, max_rows=rows), num_draft_tokens=3, pick=pick)


class Noticed(AssertionError):
    """A check detected an error."""


def dist_holds() -> None:
    """Checks the joint distribution of three tokens under rule `rejection` with a sampling draft model."""
    _joint_dist_holds(drafter(500, "sampled"))


def deterministic_dist_holds() -> None:
    """Checks the same with deterministic tokens."""
    _joint_dist_holds(NoisyChain([[*PROMPT, 2, 2, 2, 2, 2, 2]], 1.0, VOCAB, 3))


def _joint_dist_holds(made: Any) -> None:
    engine = Engine(target(500), made, rule="rejection")
    handles = [engine.submit(PROMPT, SamplingParams(seed=seed, max_new_tokens=7)) for seed in range(2500)]
    while not engine.idle:
        engine.step()
    reader = target()
    exact = joint(lambda text: dist(reader.logits_after([*PROMPT, *text]), 1.0), 3, VOCAB)
    chance = p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact)
    if chance < 1e-6:
        raise Noticed(f"p = {chance}")
    assert chance > 1e-3


def texts_hold(kind: str) -> None:
    """Checks that replay with trees, chains or a draft model gives the oracle's text, at T = 0 and above."""
    wanted = [SamplingParams(seed=seed, max_new_tokens=14, temperature=0.9 * (seed % 2)) for seed in range(6)]
    reader = target()
    want = [plain_decode(reader.logits_after, PROMPT, params) for params in wanted]
    texts = [[*PROMPT, *text] for text in want]
    made = {
        "chain": lambda: NoisyChain(texts, 0.8, VOCAB, 4),
        "pausing": lambda: PausingChain(texts, 0.8, VOCAB, 4),
        "tree": lambda: NoisyTree(texts, 0.8, VOCAB, 9),
        "draft_model": lambda: drafter(8, "coupled"),
    }[kind]()
    engine = Engine(target(), made)
    try:
        handles = engine.generate([PROMPT] * 6, wanted)
    except (ValueError, IndexError, RuntimeError) as error:
        raise Noticed(str(error)) from error
    if [handle.tokens for handle in handles] != want:
        raise Noticed("another text")
    if engine.stats.alpha < 0.2:
        raise Noticed("nothing is accepted any more")
    if engine.target.cache.pages.num_used:
        raise Noticed("pages were lost")


def trees_hold() -> None:
    texts_hold("tree")


def chains_hold() -> None:
    texts_hold("chain")


def chains_with_pauses_hold() -> None:
    texts_hold("pausing")


def coupled_drafts_hold() -> None:
    """Checks texts, and that every proposal equals the draft's own text for that seed."""
    propose = draft_model_module.DraftModelDrafter.propose
    wrong: list[list[int]] = []

    def checked(self: Any, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        draft = propose(self, view, rows, budget, rng)
        tokens, start = draft.tokens.tolist(), 0
        for at, row in enumerate(rows):
            chain = tokens[start + 1 : start + draft.counts[at]]
            start += draft.counts[at]
            sampling = view.sampling(rows)
            params = SamplingParams(
                temperature=float(sampling.temperature[at].double().round(decimals=3)),
                seed=int(sampling.seeds[at]),
                max_new_tokens=max(len(chain), 1),
            )
            if chain and chain != plain_decode(self.model.logits_after, list(view.tokens(row)), params):
                wrong.append(chain)  # an exception here would only end the row's drafts
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model_module.DraftModelDrafter, "propose", checked)
        texts_hold("draft_model")
    if wrong:
        raise Noticed(f"drafts that are not the draft model's: {wrong[:3]}")


def forbidden_tokens_hold() -> None:
    """Checks that a uniform of exactly zero does not accept a token that the target forbids."""
    verify = token_module.rejection_verify

    def with_zeros(
        tokens: Any, offsets: Any, kinds: Any, dist_index: Any, logits: Any, sampling: Any, *rest: Any, **more: Any
    ) -> Any:
        stats = distribution_stats(logits, *sampling, masses=True)
        more["uniforms"] = torch.zeros(len(tokens))
        return (*verify(tokens, offsets, kinds, dist_index, (logits, *stats[:4]), *rest, **more), *stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_module, "rejection_verify_logits", with_zeros)
        handle = Engine(target(), NoisyChain([[*PROMPT, 2, 2, 2]], 1.0, VOCAB, 2), rule="rejection").generate(
            [PROMPT], SamplingParams(seed=1, top_k=1, max_new_tokens=3)
        )[0]
    if "accepted" in handle.origins and handle.tokens != plain_decode(
        target().logits_after, PROMPT, SamplingParams(temperature=0, max_new_tokens=3)
    ):
        raise Noticed("a token of probability zero")

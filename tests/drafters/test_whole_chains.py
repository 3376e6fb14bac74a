"""Chains that a draft model drafts in one call: tokens and distributions of single passes, and losslessness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.drafters.draft_model import DraftModelDrafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget
from specdec_fast.targets.tiny_models import tiny_model
from specdec_kernels.dispatch import extension

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-p and min-p": {"top_p": 0.8, "min_p": 0.05},
}


def draft(**shape: Any) -> HuggingFaceTarget:
    return HuggingFaceTarget(tiny_model("llama"), max_length=128, fused_forward=True, **shape)


def proposals(made: Any, filters: dict[str, Any], monkeypatch: Any, whole: bool) -> list[Draft]:
    """Yields three drafts of three rows, of which one does not draft, while texts grow."""
    if not whole:
        monkeypatch.setattr(DraftModelDrafter, "_fused_chain_forward", lambda self: None)
    state, found = DecodeState(8, 128), []
    for at, temperature in enumerate([1.0, 0.0, 0.6, 1.3]):
        params = SamplingParams(seed=10 + at, temperature=temperature, **(filters if temperature else {}))
        state.join(models.prompt(3 + 5 * at), params, 3 + 5 * at, ())
    made.begin(state, range(4), None)
    for limits in ([5, 3, 0, 1], [2, 0, 4, 4], [5, 5, 5, 5]):
        with torch.inference_mode():
            found.append(made.propose(state, range(4), Budget(limits), state.rng(range(4))))
        tokens, offsets = found[-1].tokens.tolist(), found[-1].offsets.tolist()
        # rows accept one, all, none and one of their tokens
        kept = [tokens[a + 1 : b][:most] for a, b, most in zip(offsets, offsets[1:], (1, 9, 0, 1))]
        state.append(range(4), [[*own, 7] for own in kept])
    made.release(range(4))
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("pick", ["coupled", "sampled", "greedy"])
def test_drafts_are_those_of_single_passes(pick: str, filters: str, monkeypatch: Any) -> None:
    made = get_drafter("draft_model")(draft(), pick=pick)
    together = proposals(made, FILTERS[filters], monkeypatch, whole=True)
    apart = proposals(made, FILTERS[filters], monkeypatch, whole=False)
    for one, other in zip(together, apart, strict=True):
        one.check(made.model.vocab_size)
        assert one.counts == other.counts and torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.proposal_kinds, other.proposal_kinds) and (one.dists is None) == (other.dists is None)
        if one.dists is not None and other.dists is not None:
            nodes = one.proposal_kinds > 0
            dists = [
                each.dists.select(each.dist_index[nodes].long()) for each in (one, other) if each.dists is not None
            ]
            for ours, theirs in zip(
                (dists[0].logits, *dists[0].stats), (dists[1].logits, *dists[1].stats), strict=True
            ):
                assert torch.equal(ours, theirs)
    assert made.model.cache.pages.num_used == 0


def test_a_draft_s_ids_beyond_the_target_s_are_never_picked() -> None:
    for pick in ("coupled", "sampled", "greedy"):
        made = get_drafter("draft_model")(draft(), pick=pick, vocab_size=40)
        state = DecodeState(4, 128)
        rows = [state.join([at + 1], SamplingParams(seed=at, temperature=1.5), 1, ()) for at in range(4)]
        made.begin(state, rows, None)
        with torch.inference_mode():
            proposed = made.propose(state, rows, Budget([8] * 4), state.rng(rows))
        assert int(proposed.tokens.max()) < 40
        assert proposed.dists is None or proposed.dists.logits.shape == (32, 40)


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}}])
def test_processors_run_between_passes(changes: dict[str, Any], monkeypatch: Any) -> None:
    """Without processors, the chain is one call."""
    made, calls = get_drafter("draft_model")(draft(), num_draft_tokens=3), []
    whole = made.model.fused_forward
    run = whole.run_chain
    whole.run_chain = lambda *arguments: calls.append(len(calls)) or run(*arguments)
    for processors, expected in (({}, True), (changes, False)):
        calls.clear()
        engine = Engine(models.target("llama"), made)
        engine.generate([models.prompt(4)], SamplingParams(seed=1, max_new_tokens=12, **processors))
        assert bool(calls) is expected


def test_an_interrupted_chain_is_drafted_again(monkeypatch: Any) -> None:
    """The interrupt comes between the call and its bookkeeping: the next draft equals a fresh one."""
    made, state = get_drafter("draft_model")(draft()), DecodeState(8, 128)
    rows = [state.join(models.prompt(9), SamplingParams(seed=3, temperature=1.0), 9, ())]
    made.begin(state, rows, None)

    def propose(one: Any) -> list[int]:
        with torch.inference_mode():
            return one.propose(state, rows, Budget([4]), state.rng(rows)).tokens.tolist()

    first = propose(made)
    state.append(rows, [first[1:3]])

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made._runner, "mark_stored", broken)
        with pytest.raises(KeyboardInterrupt):
            propose(made)
    kept, drafted = made._runner._stored[rows[0]]
    assert kept <= state.length(rows[0]) - 1 and drafted == []
    fresh = get_drafter("draft_model")(draft())
    fresh.begin(state, rows, None)
    assert propose(made) == propose(fresh)


def test_an_overridden_extend_is_called() -> None:
    class Own(HuggingFaceTarget):
        def extend(self, *arguments: Any, **named: Any) -> Any:
            output = super().extend(*arguments, **named)
            if output.logits is not None:
                output.logits[:, :50] = float("-inf")
            return output

    model = Own(tiny_model("llama"), max_length=128, fused_forward=True)
    assert model.fused_forward is None and draft().fused_forward is not None
    made, state = get_drafter("draft_model")(model), DecodeState(8, 128)
    rows = [state.join([3], SamplingParams(seed=at, temperature=1.0), 1, ()) for at in range(3)]
    made.begin(state, rows, None)
    with torch.inference_mode():
        tokens = made.propose(state, rows, Budget([4] * 3), state.rng(rows)).tokens.view(3, 5)
    assert int(tokens[:, 1:].min()) >= 50


@pytest.mark.parametrize(("rule", "temperature"), [("rejection", 1.0), ("rejection", 0.7), ("block", 1.0)])
def test_texts_have_the_distribution_of_the_target(rule: str, temperature: float) -> None:
    """Texts of three tokens of four ids, several steps each, from sampled chains of two."""
    target = AutomatonTarget(random_logits(23, 4, seed=2), max_rows=64)
    small = HuggingFaceTarget(
        tiny_model("llama", vocab_size=4, logit_std=1.5), max_length=32, max_rows=64, fused_forward=True
    )
    made = get_drafter("draft_model")(small, num_draft_tokens=2, pick="sampled")
    assert small.fused_forward is not None
    engine, seen = Engine(target, made, rule=rule), Counter[tuple[int, ...]]()
    params = [SamplingParams(seed=seed, temperature=temperature, max_new_tokens=3) for seed in range(12000)]
    for handle in engine.generate([[1]] * len(params), params):
        seen[tuple(handle.tokens)] += 1
    assert 0.2 < engine.stats.alpha_per_position[0] < 0.95, "a test of acceptance accepts and refuses"
    exact = joint(lambda text: dist(target.logits_after([1, *text]), temperature), 3, 4)
    assert p_value(seen, exact) > 1e-3

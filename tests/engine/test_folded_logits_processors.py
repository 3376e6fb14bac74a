"""Overlays of logits processors, as on a GPU, through the whole engine: texts equal those of processing in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.test_public_interface import ENDS, PROMPTS, automaton, drafter, rows, table
from oracles.automaton import AutomatonTarget
from oracles.processed_decoding import processed_decode

import specdec_fast.sampling.target_distributions as target_distributions_module
from specdec_fast import Engine, get_drafter

RULES = {
    "replay": "recursive_rejection",
    "recursive_rejection": "recursive_rejection",
    "traversal": "recursive_rejection",
    "lossy": "recursive_rejection",
    "lossy:among=2": "recursive_rejection",
}
RULES |= {"replay on chains": "chain", "rejection": "model", "block": "model"}


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize("rule", RULES)
def test_overlays_give_the_texts_of_processing_in_place(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every rule, with log-probabilities."""
    kinds = ["repetition", "bias", "grammar", "forced", "all", "minimum"]
    wanted = [replace(own, logprobs=2) for own in rows(0.8, 3, kinds)]
    target = automaton()
    want = [processed_decode(target.logits_after, p, own, ENDS) for p, own in zip(PROMPTS, wanted, strict=True)]
    texts, found = [[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)], []
    for folds in (False, True):
        monkeypatch.setattr(target_distributions_module, "uses_overlay", lambda logits, folds=folds: folds)
        picked = {"pick": "sampled"} if RULES[rule] == "model" else {}
        draft = drafter(RULES[rule], texts)
        if picked:
            draft = get_drafter("draft_model")(AutomatonTarget(table(0.3), max_rows=6), num_draft_tokens=4, **picked)
        engine = Engine(automaton(), draft, rule=rule.partition(" ")[0], eos_token_ids=ENDS)
        handles = engine.generate(PROMPTS, wanted)
        assert [handle.error for handle in handles] == [None] * 6
        found.append([(handle.tokens, handle.logprobs) for handle in handles])
        assert engine.stats.tau > 1.2
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    assert not rule.startswith("replay") or [tokens for tokens, _ in found[0]] == want
    for (_, one), (_, other) in zip(*found, strict=True):
        assert [each.logprob for each in one] == pytest.approx([each.logprob for each in other], abs=1e-5)

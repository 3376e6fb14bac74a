"""Features of EAGLE-3 alone: a reduced vocabulary, and layers by number. The rest is in test_eagle.py."""

from __future__ import annotations

from pathlib import Path

import torch
from oracles import heads, models
from oracles.automaton import scripted
from oracles.automaton_head import AutomatonHead
from oracles.head_drafts import automaton, proposed

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.core.draft import ProposalKind
from specdec_fast.interfaces import Budget


def test_sampled_tokens_carry_distributions_over_the_head_s_vocabulary() -> None:
    target, kept = automaton(), [0, 2, 3, 7]
    made = get_drafter("eagle3")(target, AutomatonHead(automaton(seed=9), kept), how="sampled", depth=0)
    draft = proposed(made, target, [[1, 2], [3, 1, 1]], 25, temperature=1.0)
    draft.check(8)
    assert draft.dists is not None and draft.dists.token_ids is not None
    assert draft.dists.logits.shape[1] == 4 and draft.dists.token_ids.tolist() == kept
    roots = set(draft.offsets.tolist()[:-1])
    sampled = [node for node in range(draft.num_nodes) if node not in roots]
    assert {int(draft.tokens[node]) for node in sampled} <= set(kept)
    assert {int(draft.proposal_kinds[node]) for node in sampled} == {ProposalKind.SAMPLED_WITHOUT_EARLIER}


def test_processors_apply_to_the_head_s_reduced_vocabulary() -> None:
    """A banned token is not drafted, for any logits of the head."""
    script = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    target = scripted(script, 8)
    made = get_drafter("eagle3")(target, AutomatonHead(scripted(script, 8), (1, 2, 3, 4, 6)), depth=3, width=2)
    draft = proposed(made, target, [[1, 2]], 6, temperature=0, banned_token_ids=(3,))
    assert 3 not in draft.tokens[1:].tolist()


def test_layers_change_the_drafts_and_not_the_text(tmp_path: Path) -> None:
    options = heads.options("eagle3", tmp_path)
    texts, seen = [], []
    for layers in ((0, 1, 1), (1, 0, 1)):
        target = models.target("llama", max_rows=2)
        made = get_drafter("eagle3")(target, options["head"], layers=layers)
        engine = Engine(target, made)
        handles = [engine.submit(models.prompt(17), SamplingParams(temperature=0, max_new_tokens=8))]
        engine.step()
        with torch.inference_mode():
            drafted = made.propose(engine.state, [0], Budget([9]), engine.state.rng([0]))
        seen.append(drafted.tokens.tolist())
        while not engine.idle:
            engine.step()
        texts.append(handles[0].tokens)
    assert texts[0] == texts[1] == models.greedy_text("llama", 17, 8) and seen[0] != seen[1]

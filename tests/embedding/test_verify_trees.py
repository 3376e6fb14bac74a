"""verify_trees: exact distributions of trees of every proposal kind, replay, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.markov_texts import ROOT, SETTINGS, VOCAB, probs, table, text_p_value

from specdec_fast import Draft, ProposalKind, TokenDistributions, verify, verify_trees
from specdec_fast.embedding import emitted_tokens

ROWS = 12_000
PARENTS = [-1, 0, 0, 1, 1, 2, 2]


def sampled_trees(kind: ProposalKind, rows: int = ROWS, apart: float = 0.5) -> tuple[Draft, torch.Tensor]:
    """Binary trees of depth 2 whose tokens are sampled from a table, and the token before each node's children."""
    q = torch.from_numpy(probs(table(5) + apart * table(61), {"temperature": 1.2})).float()
    source = torch.Generator().manual_seed(4)
    tokens = torch.full((rows, len(PARENTS)), ROOT)
    for first in (1, 3, 5):
        before = tokens[:, PARENTS[first]]
        if kind == ProposalKind.DETERMINISTIC:
            pair = q[before].topk(2).indices
        else:
            again = kind == ProposalKind.SAMPLED
            pair = torch.multinomial(q[before], 2, replacement=again, generator=source)
        tokens[:, first : first + 2] = pair
    sources: dict[str, Any] = {}
    if kind != ProposalKind.DETERMINISTIC:
        before = tokens[:, PARENTS[1:]]
        sources = {
            "kinds": [[int(kind)] * 6] * rows,
            "dist_rows": before.tolist(),  # the table has one distribution per token
            "dists": TokenDistributions.from_probs(q),
        }
    draft = Draft.trees(range(rows), [(own, PARENTS) for own in tokens.tolist()], **sources)
    return draft, tokens.flatten()


def keys(rows: int) -> dict[str, torch.Tensor]:
    return {"seeds": torch.arange(rows) * 3, "positions": torch.arange(rows) % 5 + 1}


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal", "replay"])
@pytest.mark.parametrize(
    "kind", [ProposalKind.DETERMINISTIC, ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_EARLIER]
)
def test_the_joint_distribution_is_exact(rule: str, kind: ProposalKind) -> None:
    target, settings = table(5), "plain" if rule == "replay" else "top-p"
    draft, before = sampled_trees(kind)
    acceptance = verify_trees(target[before], draft, rule=rule, **keys(ROWS), **SETTINGS[settings])  # type: ignore[arg-type]
    out = emitted_tokens(draft, acceptance)
    assert out.dtype == torch.int32 and out.shape == (ROWS, 3)
    assert text_p_value(out, probs(target, SETTINGS[settings])) > 1e-3
    assert torch.equal((out >= 0).sum(1), acceptance.num_accepted.long() + 1)
    assert 0.3 < float(acceptance.num_accepted.float().mean()) < 2


@pytest.mark.parametrize("mistake", ["with replacement", "arg-max drafts, softmax q", "wrong parent"])
def test_mistakes_of_a_caller_show_in_the_distribution(mistake: str) -> None:
    target = table(5)
    draft, before = sampled_trees(ProposalKind.SAMPLED_WITHOUT_EARLIER, apart=2)
    if mistake == "with replacement":
        draft.proposal_kinds = draft.proposal_kinds.clamp(max=1)
    elif mistake == "wrong parent":
        before = before.roll(1)
    else:
        sources, kinds, index = draft.dists, draft.proposal_kinds.clamp(max=1), draft.dist_index
        draft, before = sampled_trees(ProposalKind.DETERMINISTIC, apart=2)
        draft.dists, draft.proposal_kinds, draft.dist_index = sources, kinds, index
    acceptance = verify_trees(target[before], draft, rule="recursive_rejection", **keys(ROWS))
    assert text_p_value(emitted_tokens(draft, acceptance), probs(target, {})) < 1e-6


def test_replay_of_a_tree_is_replay_of_a_chain() -> None:
    """The same seeds emit the same tokens, as far as either draft reaches."""
    target, rows = table(5), 2000
    draft, before = sampled_trees(ProposalKind.DETERMINISTIC, rows)
    out = emitted_tokens(draft, verify_trees(target[before], draft, temperature=0.8, **keys(rows)))
    chains = draft.tokens.view(rows, -1)[:, [2, 6]]
    logits = target[torch.cat([torch.full((rows, 1), ROOT), chains], 1)]
    other = verify(logits, chains, rule="replay", temperature=0.8, **keys(rows))
    both = (out >= 0) & (other >= 0)
    assert torch.equal(out[both], other[both]) and both[:, 0].all() and both[:, 1].any()


def test_a_draft_of_tensors_and_lists_is_checked() -> None:
    logits = torch.zeros(3, VOCAB)
    draft = Draft.trees([0], [(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]))])
    good: dict[str, Any] = {"seeds": [1], "positions": [0]}
    assert verify_trees(logits, draft, **good).path.shape == (1, 2)
    assert verify_trees(logits, draft, rule="greedy").num_accepted.tolist() == [0]
    for change, words in (
        ({"logits": logits[:2]}, r"got logits \[2, 5\]; expected \[3, V\], a row for each node"),
        ({"rule": "block"}, "rule block: got a tree; expected chains"),
        ({"rule": "ordered"}, "is now called 'recursive_rejection'"),
        ({"rule": "greedy", "temperature": 1.0}, "rule greedy: got temperature 1.0"),
        ({"draft": Draft.trees([0], [([0, 1, 9], [-1, 0, 0])])}, "node 2: got token 9; expected 0..4"),
        ({"seeds": None}, "seeds: got None"),
    ):
        with pytest.raises(ValueError, match=words):
            verify_trees(**{"logits": logits, "draft": draft} | good | change)


def test_nobody_at_all() -> None:
    draft = Draft.trees([], [])
    acceptance = verify_trees(torch.empty(0, VOCAB), draft, seeds=[], positions=[])
    assert emitted_tokens(draft, acceptance).shape == (0, 1)

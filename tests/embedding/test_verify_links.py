"""verify_links: trees in SGLang's layout are verified as the same trees of a Draft, and unlinked nodes never are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles.markov_texts import ROOT, logits_of, probs, sampled_chains, table, text_p_value

from specdec_fast import Draft, TokenDistributions, verify_trees
from specdec_fast.embedding import links_from_parents, verify_links

NODES, VOCAB = 9, 12


def some_trees(rows: int, seed: int, unlinked: int = 0) -> torch.Tensor:
    """Parents [rows, NODES + unlinked]; the last nodes have none."""
    source = random.Random(seed)
    trees = [[-1, *(source.randrange(node) for node in range(1, NODES))] for _ in range(rows)]
    return torch.tensor([tree + [-1] * unlinked for tree in trees])


@pytest.mark.parametrize("rule", ["replay", "recursive_rejection", "traversal", "greedy"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_answer_is_that_of_the_same_draft(rule: str, sampled: bool) -> None:
    rows, unlinked = 60, 3
    parents, wide = some_trees(rows, 1, unlinked), NODES + unlinked
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, wide, VOCAB, generator=source) * 2
    tokens = torch.randint(0, VOCAB, (rows, wide), generator=source)
    q = torch.randn(rows, wide - 1, VOCAB, generator=source).softmax(-1)
    links = links_from_parents(parents, unused=True)
    options: dict[str, Any] = {"rule": rule, "seeds": torch.arange(rows), "positions": torch.arange(rows) + 9}
    options |= {} if rule == "greedy" else {"temperature": torch.rand(rows, generator=source) + 0.5, "top_k": 8}
    found = verify_links(
        logits, tokens, links.next_token, links.next_sibling, q if sampled else None, max_depth=NODES, **options
    )
    sources: dict[str, Any] = {}
    if sampled:
        sources = {
            "dists": TokenDistributions.from_probs(q[:, : NODES - 1].flatten(0, 1)),
            "dist_rows": torch.arange(rows * (NODES - 1)).view(rows, NODES - 1).tolist(),
        }
    draft = Draft.trees(range(rows), list(zip(tokens[:, :NODES], parents[:, :NODES])), **sources)
    want = verify_trees(logits[:, :NODES].flatten(0, 1), draft, **options)
    assert torch.equal(found.num_accepted, want.num_accepted) and torch.equal(found.next_token, want.next_token)
    assert int(found.num_accepted.sum()) > 0 and found.path.shape == (rows, NODES + 1)
    depth = want.path.shape[1]
    local = torch.where(want.path >= 0, want.path % NODES, -1)
    mine = torch.where(found.path >= 0, found.path % wide, -1)
    assert torch.equal(mine[:, :depth], local) and mine[:, depth:].eq(-1).all()
    assert torch.equal(found.path[:, 0], torch.arange(rows, dtype=torch.int32) * wide)


def test_sampled_chains_keep_the_distribution() -> None:
    """The layout that SGLang has under rejection sampling: links of a chain, and a distribution for each token."""
    target, rows = table(5), 20_000
    chains, q = sampled_chains(probs(table(51), {"temperature": 0.8}), rows, 1)
    tokens = torch.cat([torch.full((rows, 1), ROOT), chains], 1)
    links = links_from_parents(torch.arange(-1, 2).expand(rows, 3))
    for rule in ("recursive_rejection", "traversal"):
        found = verify_links(
            logits_of(target, chains),
            tokens,
            links.next_token,
            links.next_sibling,
            q,
            rule=rule,
            seeds=torch.arange(rows),
            positions=torch.full((rows,), 4),
        )
        places = torch.arange(3)
        ahead = torch.cat([chains, torch.full((rows, 1), -1)], 1)
        out = torch.where(places < found.num_accepted[:, None], ahead, -1)
        out = torch.where(places == found.num_accepted[:, None], found.next_token[:, None], out)
        assert text_p_value(out, probs(target, {})) > 1e-3
        assert 0.1 < float(found.num_accepted.float().mean()) < 2


def test_bad_input_is_explained() -> None:
    tokens, none = torch.tensor([[1, 2, 3]]), torch.full((1, 3), -1)
    good: dict[str, Any] = {
        "logits": torch.zeros(3, 5),
        "draft_tokens": tokens,
        "next_token": torch.tensor([[1, -1, -1]]),
        "next_sibling": torch.tensor([[-1, 2, -1]]),
        "seeds": [1],
        "positions": [2],
    }
    assert verify_links(**good).path.shape == (1, 3)
    for change, words in (
        ({"logits": torch.zeros(2, 5)}, r"expected \[B \* D, V\] and twice \[B, D\]"),
        ({"draft_tokens": tokens[0]}, "verify_links: got logits"),
        ({"next_sibling": none[:, :2]}, "expected equal shapes"),
        ({"next_token": torch.tensor([[1, 2, 1]]), "next_sibling": none}, "node 1: got two links to it"),
        (
            {"next_token": torch.tensor([[2, -1, 1]]), "next_sibling": none},
            "node 1: got parent 2; expected an earlier node",
        ),
        ({"draft_probs": torch.zeros(1, 3, 5), "rule": "traversal"}, r"expected \[1, 2, V\] with V at most 5"),
        ({"seeds": None}, "seeds: got None"),
        ({"rule": "token"}, "is now called 'rejection'"),
    ):
        with pytest.raises(ValueError, match=words):
            verify_links(**good | change)

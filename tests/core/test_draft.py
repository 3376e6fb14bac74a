"""Draft and TokenDistributions: constructors, checks, probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracles.distributions import dist
from torch import Tensor

from specdec_fast.core import chain_layout as packed_shape_module
from specdec_fast.core import draft as draft_module
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_kernels import TreePlan, distribution_stats, tree_plan


def dists(rows: int, vocab: int = 7, seed: int = 0, **changes: float) -> TokenDistributions:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    settings = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    columns = [
        torch.full((rows,), settings[name], dtype=torch.int32 if name == "top_k" else torch.float32)
        for name in ("temperature", "top_k", "top_p", "min_p")
    ]
    return TokenDistributions(logits, *distribution_stats(logits, *columns))


def test_chains_are_packed_row_after_row() -> None:
    draft = Draft.chains([4, 1, 7], [[9, 1, 2], [8], [5, 6]])
    assert draft.rows.tolist() == [4, 1, 7] and draft.offsets.tolist() == [0, 3, 4, 6]
    assert draft.tokens.tolist() == [9, 1, 2, 8, 5, 6]
    assert draft.parents.tolist() == [-1, 0, 1, -1, -1, 0]
    assert draft.row_of.tolist() == [0, 0, 0, 1, 2, 2] and draft.counts == (3, 1, 2)
    assert draft.max_depth == 2 and draft.is_chain and draft.num_rows == 3 and draft.num_nodes == 6
    assert draft.proposal_kinds.tolist() == [ProposalKind.DETERMINISTIC] * 6 and draft.dist_index.tolist() == [-1] * 6
    assert [draft.tokens.dtype, draft.rows.dtype, draft.proposal_kinds.dtype] == [torch.int64, torch.int32, torch.int8]
    draft.check(vocab_size=10)


def test_sampled_chains_name_their_distributions() -> None:
    draft = Draft.chains([0, 1, 2], [[3, 1], [3], [3, 4, 5]], dist_rows=[[2], [], [0, 1]], dists=dists(3))
    assert draft.dist_index.tolist() == [-1, 2, -1, -1, 0, 1]
    assert draft.proposal_kinds.tolist() == [0, 1, 0, 0, 1, 1]
    draft.check(vocab_size=7)


def test_a_repeated_shape_keeps_its_own_tokens() -> None:
    first, second = Draft.chains([0, 1], [[1, 2], [3]]), Draft.chains([0, 1], [[4, 5], [6]])
    assert first.tokens.tolist() == [1, 2, 3] and second.tokens.tolist() == [4, 5, 6]


def test_rows_without_nodes_are_legal() -> None:
    draft = Draft.chains([0, 1], [[], [5, 6]])
    assert draft.offsets.tolist() == [0, 0, 2]
    draft.check(vocab_size=7)
    assert Draft.chains([], []).num_nodes == 0


def test_trees_are_packed_and_planned() -> None:
    draft = Draft.trees(
        [3, 0], [([9, 1, 2, 1], [-1, 0, 0, 1]), ([8], [-1])], score_only=[False, False, True, False, False]
    )
    assert draft.parents.tolist() == [-1, 0, 0, 1, -1] and draft.max_depth == 2 and not draft.is_chain
    assert draft.score_only is not None and draft.score_only.tolist() == [False, False, True, False, False]
    assert draft.row_of.tolist() == [0, 0, 0, 0, 1] and draft.counts == (4, 1)
    plan = tree_plan(draft.parents, draft.offsets)
    assert plan.depth.tolist() == [0, 1, 1, 2, 0] and plan.row.tolist() == draft.row_of.tolist()
    draft.check(vocab_size=10)


def test_trees_without_branches_are_chains() -> None:
    """Steps then use the remembered layout of the chains; score-only nodes and branches keep a tree."""
    chains = [([7, 8, 9], [-1, 0, 1]), ([5], [-1])]
    draft = Draft.trees([2, 0], chains)
    assert draft.is_chain and draft.parents is Draft.chains([2, 0], [[7, 8, 9], [5]]).parents
    assert draft.tokens.tolist() == [7, 8, 9, 5] and draft.counts == (3, 1) and draft.max_depth == 2
    draft.check(10, {2: 7, 0: 5})
    assert not Draft.trees([2, 0], chains, score_only=[False, False, True, False]).is_chain
    assert not Draft.trees([2, 0], [([7, 8, 9], [-1, 0, 0]), ([5], [-1])]).is_chain


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (([1, 2], [-1]), "2 tokens and 1 parents"),
        (([1, 2], [-1, 1]), "node 1: got parent 1"),
        (([1, 2], [-1, -1]), "node 1: got parent -1"),
        (([1, 2], [-1, -2]), "node 1: got parent -2"),
        (([1, 2], [0, 0]), "node 0: got parent 0"),
    ],
)
def test_bad_trees_are_refused(tree: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Draft.trees([5], [tree])
    assert "tree of row 5" in str(error.value) and "expected" in str(error.value)


GOOD = Draft.trees([0, 1], [([1, 2, 3], [-1, 0, 0]), ([4, 5], [-1, 0])])
WIDE = tree_plan(GOOD.parents, GOOD.offsets, 64)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": ints(0, 3)}, r"offsets has shape \[2\]; expected \[3\]"),
        ({"offsets": ints(0, 2, 5)}, r"got offsets \[0, 2, 5\]; expected \[0, 3, 5\]"),
        ({"counts": (2, 3)}, "got offsets"),
        ({"counts": (3, 3)}, r"tokens has shape \[5\]; expected \[6\]"),
        ({"counts": (6, -1)}, "got counts"),
        ({"counts": (5,)}, "got counts"),
        ({"counts": [3, 2]}, r"got counts \[3, 2\] of rows"),
        ({"rows": ints(0)}, r"rows has shape \[1\]; expected \[2\]"),
        ({"rows": ints(0), "row_ids": None}, "got counts"),
        ({"row_ids": (0, 2)}, r"got rows \[0, 1\]; expected \[0, 2\]"),
        ({"row_of": ints(0, 0, 1, 1, 1, dtype=torch.int64)}, "got row_of"),
        ({"parents": ints(-1, 0, 2, -1, 0)}, "row 0, node 2: got parent 2"),
        ({"parents": ints(-1, 0, 0, 0, 0)}, "row 1, node 0: got parent 0"),
        ({"parents": ints(-1, 0, 0, -1, -2)}, "row 1, node 1: got parent -2"),
        ({"parents": ints(-1, 0, 0, -1, -1)}, "row 1, node 1: got parent -1"),
        ({"parents": ints(-1, 0, 0, -1, 0, dtype=torch.int64)}, "parents has dtype torch.int64"),
        ({"parents": ints(-1, 0, 1, -1, 0)}, "max_depth 1 and a node at depth 2"),
        ({"tokens": ints(1, 2, 3, 4, 6, dtype=torch.int64)}, "node 4: got token 6"),
        ({"tokens": ints(1, -1, 3, 4, 5, dtype=torch.int64)}, "node 1: got token -1"),
        ({"is_chain": True}, "got a tree; expected is_chain=False"),
        ({"plan": tree_plan(ints(-1, 0, 1, -1, 0), GOOD.offsets)}, "not that of its parents"),
        ({"plan": replace(WIDE, ancestors=WIDE.ancestors + ints(0, 1))}, "not that of its parents"),
        ({"plan": replace(WIDE, ancestors=WIDE.ancestors[:, :0])}, "not that of its parents"),
        ({"score_only": torch.zeros(4, dtype=torch.bool)}, "score_only has shape"),
        ({"proposal_kinds": ints(0, 9, 0, 0, 0, dtype=torch.int8)}, "node 1: got proposal kind 9"),
        ({"proposal_kinds": ints(0, -1, 0, 0, 0, dtype=torch.int8)}, "node 1: got proposal kind -1"),
        ({"proposal_kinds": ints(0, 1, 0, 0, 0, dtype=torch.int8)}, "node 1: got distribution row -1"),
        ({"dists": replace(dists(2), inv_t=torch.ones(3))}, "the inv_t has"),
        ({"dists": dists(2, vocab=7)}, "got 7 columns; expected at most the target's 6"),
        (
            {"dists": replace(dists(2, vocab=2), token_ids=ints(0, 6, dtype=torch.int64))},
            "token_ids 0..6; expected 0..5",
        ),
        ({"dists": replace(dists(2, vocab=3), token_ids=ints(0, 5, dtype=torch.int64))}, "token_ids has shape"),
    ],
)
def test_check_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **changes).check(vocab_size=6)
    GOOD.check(vocab_size=6)
    replace(GOOD, plan=tree_plan(GOOD.parents, GOOD.offsets), dists=dists(2, vocab=6)).check(vocab_size=6)
    replace(GOOD, plan=WIDE).check(vocab_size=6)


def test_a_draft_has_the_requested_rows_and_begins_with_their_newest_tokens() -> None:
    GOOD.check(6, {0: 1, 1: 4})
    for roots, message in (({0: 1, 2: 4}, r"got rows \[0, 1\]"), ({0: 1, 1: 5}, r"begin with \[1, 5\]")):
        with pytest.raises(ValueError, match=message):
            GOOD.check(6, roots)


def test_a_distribution_row_that_does_not_exist_is_refused() -> None:
    draft = Draft.chains([0], [[1, 2]], dist_rows=[[1]], dists=dists(1))
    with pytest.raises(ValueError, match="distribution row 1; expected one of the draft's 1 distributions"):
        draft.check()


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.7}]
)
def test_probs_are_the_probabilities(changes: dict[str, float]) -> None:
    made = dists(5, **changes)
    settings = {"temperature": 0.8} | changes
    settings["temperature"] = float(torch.tensor(settings["temperature"], dtype=torch.float32))
    for row, weights in zip(made.logits, made.probs(), strict=True):
        want = dist(row.numpy(), **{k: (int(v) if k == "top_k" else v) for k, v in settings.items()})
        assert torch.allclose(weights, torch.from_numpy(want), atol=1e-6)


def test_distributions_are_selected_and_joined_by_rows() -> None:
    one, two = dists(3), dists(2, seed=1)
    both = concat_distributions([one, two])
    assert torch.equal(both.probs(), torch.cat([one.probs(), two.probs()]))
    assert torch.equal(both.select(torch.tensor([4, 0])).probs(), both.probs()[[4, 0]])
    assert concat_distributions([one]) is one


def test_a_plan_is_made_for_the_largest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this bound, a GPU allocates ancestor words for all nodes of the batch."""
    bounds: list[int | None] = []

    def planned(parents: Tensor, offsets: Tensor, max_nodes: int | None = None) -> TreePlan:
        bounds.append(max_nodes)
        return tree_plan(parents, offsets, max_nodes)

    monkeypatch.setattr(draft_module, "tree_plan", planned)
    monkeypatch.setattr(packed_shape_module, "tree_plan", planned)
    draft = Draft.trees([0, 1], [([1, 2, 3], [-1, 0, 0]), ([4], [-1])])
    plan = draft.get_plan()
    assert bounds == [3] and replace(draft, plan=plan).get_plan() is plan and bounds == [3]
    packed_shape_module._remembered_layout.cache_clear()
    Draft.chains([0, 1], [[1], [2, 3, 4, 5]])
    assert bounds == [3, 4] and Draft.trees([], []).get_plan().depth.numel() == 0


def test_trees_name_how_their_tokens_were_picked() -> None:
    trees = [([7, 1, 2, 3], [-1, 0, 0, 1]), ([5], [-1]), ([], []), (torch.tensor([6, 4]), torch.tensor([-1, 0]))]
    drawn = Draft.trees([0, 1, 2, 3], trees, dist_rows=[[0, -1, 2], [], [], [1]], dists=dists(3))
    assert drawn.proposal_kinds.tolist() == [0, 1, 0, 1, 0, 0, 1]
    assert drawn.dist_index.tolist() == [-1, 0, -1, 2, -1, -1, 1] and not drawn.is_chain
    drawn.check(vocab_size=8)
    kinds = [[ProposalKind.SAMPLED_WITHOUT_EARLIER, ProposalKind.DETERMINISTIC, 1], [], [], [1]]
    named = Draft.trees([0, 1, 2, 3], trees, kinds=kinds, dist_rows=[[0, 2, 2], [], [], [1]], dists=dists(3))
    assert named.proposal_kinds.tolist() == [0, 2, 0, 1, 0, 0, 1]
    assert named.dist_index.tolist() == [-1, 0, -1, 2, -1, -1, 1]
    named.check(vocab_size=8)
    chain = Draft.trees([0], [([7, 1], [-1, 0])], dist_rows=[[0]], dists=dists(1))
    assert chain.is_chain and chain.proposal_kinds.tolist() == [0, 1]
    chain.check(vocab_size=8)
    assert torch.equal(chain.dist_index, Draft.chains([0], [[7, 1]], dist_rows=[[0]], dists=dists(1)).dist_index)


def test_trees_whose_kinds_do_not_fit() -> None:
    tree = [([7, 1, 2], [-1, 0, 0])]
    with pytest.raises(ValueError, match="dist_rows of row 4: got 1 of them; expected 2, one for each node"):
        Draft.trees([4], tree, kinds=[[0, 0]], dist_rows=[[0]])
    with pytest.raises(ValueError, match="kinds of row 4: got 3 of them; expected 2"):
        Draft.trees([4], tree, kinds=[[0, 0, 0]])
    with pytest.raises(ValueError, match=r"node 2: got proposal kind 1 and no distribution.*pass dist_rows and dists"):
        Draft.trees([4], tree, kinds=[[0, 1]])
    with pytest.raises(ValueError, match=r"specdec_fast.embedding.parent_first does"):
        Draft.trees([4], [([7, 1, 2], [-1, 2, 0])])
    with pytest.raises(TypeError, match="unexpected keyword argument 'laws'; specdec-fast calls this dists"):
        Draft.trees([4], tree, laws=dists(1))  # type: ignore[call-arg]

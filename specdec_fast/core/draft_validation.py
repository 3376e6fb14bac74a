"""Checks of drafts, on which target, rule and decode state rely. Tests: tests/core/test_draft.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.proposal_kind import ProposalKind
from specdec_kernels import tree_plan
from specdec_kernels.dispatch import argument_checks

if TYPE_CHECKING:
    from specdec_fast.core.draft import Draft


def check_draft(draft: Draft, vocab_size: int | None, roots: Mapping[int, int] | None, wait: bool) -> None:
    """Checks that a draft is well formed. See `Draft.check`, which calls it."""
    rows = draft.host_rows() if roots is None else tuple(roots)
    if draft.row_ids is not None and draft.row_ids != rows:
        raise ValueError(f"draft: got rows {list(draft.row_ids)}; expected {list(rows)}")
    if type(draft.counts) is not tuple or len(draft.counts) != len(rows) or min(draft.counts, default=0) < 0:
        raise ValueError(f"draft: got counts {draft.counts} of rows {rows}; expected a tuple, of each 0 or more")
    layout = chain_layout(rows, draft.counts, draft.tokens.device)
    reads_values, nodes = wait or draft.tokens.is_cpu, layout.row_of.shape[0]
    argument_checks.check_tensor("draft", "tokens", draft.tokens, torch.int64, nodes)
    if _is_remembered_chain(draft, layout):  # most drafts: everything but the tokens is known to be sound
        if reads_values:
            _check_tokens(draft, vocab_size, roots)
        return
    for name in ("rows", "offsets", "row_of", "parents", "proposal_kinds", "dist_index"):
        got, usual = getattr(draft, name), getattr(layout, name)
        if got is not usual:
            argument_checks.check_tensor("draft", name, got, usual.dtype, *usual.shape)
            if reads_values and name in ("rows", "offsets", "row_of") and not torch.equal(got, usual):
                raise ValueError(f"draft: got {name} {got.tolist()}; expected {usual.tolist()} as by its counts")
    if draft.score_only is not None:
        argument_checks.check_tensor("draft", "score_only", draft.score_only, torch.bool, nodes)
    if draft.dists is not None:
        draft.dists.check(vocab_size, wait=reads_values)
    if reads_values:
        _check_tokens(draft, vocab_size, roots)
        _check_parents(draft, layout)
        if draft.proposal_kinds is not layout.proposal_kinds:
            _check_proposal_kinds(draft)


def check_no_dropped_samples(draft: Draft, rule: str) -> None:
    """Checks that every sampled token is verified. See `Draft.check_no_dropped_samples`, which calls it."""
    if draft.score_only is None:
        return
    dropped = draft.score_only & (draft.proposal_kinds != ProposalKind.DETERMINISTIC)
    if bool(dropped.any()):
        raise ValueError(
            f"rule {rule}: got node {int(dropped.nonzero()[0, 0])}, a sampled token that is a score-only node; "
            "expected every sampled token to be verified (dropping one changes the distribution); mark it "
            "deterministic and give its siblings no distribution, or use replay"
        )


def _is_remembered_chain(draft: Draft, layout: ChainLayout) -> bool:
    """Whether all parts but the tokens are those of a remembered layout of deterministic chains."""
    return (
        draft.is_chain
        and draft.dists is None
        and draft.score_only is None
        and draft.rows is layout.rows
        and draft.parents is layout.parents
        and draft.offsets is layout.offsets
        and draft.proposal_kinds is layout.proposal_kinds
        and draft.dist_index is layout.dist_index
        and draft.row_of is layout.row_of
        and draft.plan is layout.plan
        and draft.max_depth >= max(draft.counts, default=1) - 1
    )


def _check_tokens(draft: Draft, vocab_size: int | None, roots: Mapping[int, int] | None) -> None:
    """Checks that ids are in the vocabulary, and that each row begins with its root."""
    tokens = draft.tokens.tolist()
    if vocab_size is not None and tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        node = next(node for node, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise ValueError(f"draft: node {node}: got token {tokens[node]}; expected 0..{vocab_size - 1}")
    start, first = 0, () if roots is None else tuple(roots.values())
    for count, root in zip(draft.counts, first):
        if count and tokens[start] != root:
            raise ValueError(f"draft: got tokens {tokens}; expected rows to begin with {list(first)}")
        start += count


def _check_parents(draft: Draft, layout: ChainLayout) -> None:
    """Checks parents, depths and the plan. `layout` is that of chains with the same counts."""
    deepest = max(draft.counts, default=1) - 1
    if draft.parents is not layout.parents and not torch.equal(draft.parents, layout.parents):
        parents, deepest = iter(draft.parents.tolist()), 0
        for row, count in enumerate(draft.counts):
            depths: list[int] = []
            for node, parent in zip(range(count), parents):
                if not 0 <= parent < node and (node, parent) != (0, -1):
                    raise ValueError(
                        f"draft: row {row}, node {node}: got parent {parent}; expected -1 for the root and an earlier "
                        "node of the row otherwise"
                    )
                depths.append(depths[parent] + 1 if node else 0)
            deepest = max(deepest, *depths, 0)
        if draft.is_chain:
            raise ValueError("draft: got a tree; expected is_chain=False, or every node behind the one before it")
    if deepest > draft.max_depth:
        raise ValueError(f"draft: got max_depth {draft.max_depth} and a node at depth {deepest}; expected a bound")
    plan = draft.plan
    if plan is not None and not (draft.is_chain and plan is layout.plan):
        links = tree_plan(draft.parents, draft.offsets, max(draft.counts, default=0))
        words = links.ancestors.shape[1]  # a plan for larger rows has more of them, all 0
        narrow = replace(plan, ancestors=plan.ancestors[:, :words])
        same = all(torch.equal(getattr(narrow, part.name), getattr(links, part.name)) for part in fields(links))
        if not same or bool(plan.ancestors[:, words:].any()):
            raise ValueError("draft: got a plan that is not that of its parents; expected tree_plan's, or None")


def _check_proposal_kinds(draft: Draft) -> None:
    """Checks that sampled nodes name one of the draft's distributions."""
    available = 0 if draft.dists is None else draft.dists.logits.shape[0]
    for node, (kind, source) in enumerate(zip(draft.proposal_kinds.tolist(), draft.dist_index.tolist())):
        if not ProposalKind.DETERMINISTIC <= kind <= ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC:
            expected = [int(each) for each in ProposalKind]
            raise ValueError(f"draft: node {node}: got proposal kind {kind}; expected one of {expected}")
        if kind and not 0 <= source < available:
            raise ValueError(
                f"draft: node {node}: got distribution row {source}; expected one of the draft's {available} "
                "distributions"
            )

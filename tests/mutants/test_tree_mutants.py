"""Known ways to get trees wrong, planted in the references one at a time: the exact distribution must notice each
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from oracles.tree_cases import CASES, check_dist
from torch import Tensor

from specdec_fast.rules import get_rule
from specdec_kernels import use_backend
from specdec_kernels.ops._proposals.checks import DETERMINISTIC, SAMPLED_WITHOUT_DETERMINISTIC, SAMPLED_WITHOUT_EARLIER
from specdec_kernels.ops._proposals.reference import DenseTrees, total_mass

Patch = pytest.MonkeyPatch
ordered_module: Any = import_module(
    "specdec_kernels.ops.recursive_rejection_verify.reference"
)  # the attribute is the operator
traversal_module: Any = import_module("specdec_kernels.ops.traversal_verify.reference")
dist_of = DenseTrees.proposal
rounds, visit = ordered_module._reject_children, traversal_module._visit_node


def _whole_dist(patch: Patch, mark: int) -> None:
    """The distribution that the token was drawn from, as if nothing were excluded."""

    def broken(tree: DenseTrees, parent: int, place: int) -> Tensor | None:
        node = tree.children[parent][place]
        kept = tree.kinds[node]
        if kept == mark:
            tree.kinds[node] = 1
        try:
            return dist_of(tree, parent, place)
        finally:
            tree.kinds[node] = kept

    patch.setattr(DenseTrees, "proposal", broken)


def unconditioned_siblings(patch: Patch) -> None:
    """Siblings drawn without replacement are tested against the whole draft distribution."""
    _whole_dist(patch, SAMPLED_WITHOUT_EARLIER)


def unconditioned_hybrid(patch: Patch) -> None:
    """The drawn child of a hybrid node is tested against the whole draft distribution."""
    _whole_dist(patch, SAMPLED_WITHOUT_DETERMINISTIC)


def chosen_taken_for_drawn(patch: Patch) -> None:
    """A chosen token is tested against the draft distribution of its node's first drawn sibling, or the target's."""

    def broken(tree: DenseTrees, parent: int, place: int) -> Tensor | None:
        node = tree.children[parent][place]
        return tree.target(parent) if tree.kinds[node] == DETERMINISTIC else dist_of(tree, parent, place)

    patch.setattr(DenseTrees, "proposal", broken)


def siblings_see_the_first_dist(patch: Patch) -> None:
    """Every child is tested against the target's own distribution: what the earlier ones took is forgotten."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        thresholds, rest = rounds(tree, node)
        p = tree.target(node)
        for place, child in enumerate(tree.children[node]):
            dist = tree.proposal(node, place)
            if dist is not None:
                thresholds[place] = min(1.0, float(p[tree.tokens[child]]) / float(dist[tree.tokens[child]]))
        return thresholds, rest

    patch.setattr(ordered_module, "_reject_children", broken)


def resample_from_p(patch: Patch) -> None:
    """When all children are refused the next token comes from the target's distribution."""
    patch.setattr(ordered_module, "_reject_children", lambda tree, node: (rounds(tree, node)[0], tree.target(node)))
    patch.setattr(
        traversal_module, "_visit_node", lambda tree, node, reach: (*visit(tree, node, reach)[:2], tree.target(node))
    )


def reach_is_not_updated(patch: Patch) -> None:
    """A node is as likely after its subtree failed as before."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        of_children, _, rest = visit(tree, node, reach)
        return of_children, reach, rest

    patch.setattr(traversal_module, "_visit_node", broken)


def reach_is_forgotten_in_the_residual(patch: Patch) -> None:
    """The positive part of P - Q in place of w P - Q."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        of_children, after, _ = visit(tree, node, reach)
        return of_children, after, visit(tree, node, 1.0)[2]

    patch.setattr(traversal_module, "_visit_node", broken)


def reach_is_the_ratio_alone(patch: Patch) -> None:
    """A child's reach without its parent's."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        return visit(tree, node, 1.0)[0], *visit(tree, node, reach)[1:]

    patch.setattr(traversal_module, "_visit_node", broken)


def coins_from_the_root(patch: Patch) -> None:
    """Thresholds of the walk from the root, looked at from the leaves."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        thresholds, rest = rounds(tree, node)
        return thresholds, reach, rest

    patch.setattr(traversal_module, "_visit_node", broken)


def normalised_before_the_difference(patch: Patch) -> None:
    """What earlier siblings left is not normalised before the next one is subtracted."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        rest, thresholds = tree.target(node), []
        for place, child in enumerate(tree.children[node]):
            dist = tree.proposal(node, place)
            if dist is None:
                thresholds.append(0.0)
                continue
            token = tree.tokens[child]
            thresholds.append(min(1.0, float(rest[token]) / max(total_mass(rest), 1e-300) / float(dist[token])))
            left = (rest - dist).clamp(min=0.0)
            rest = left if total_mass(left) > 1e-12 else rest
        return thresholds, rest

    patch.setattr(ordered_module, "_reject_children", broken)


def every_path_draws_for_itself(patch: Patch) -> None:
    """Each path draws a token of its own at a node that they share, and the first that draws what it drafted wins."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        p, children = tree.target(node), tree.children[node]
        rest = p.clone()
        rest[[tree.tokens[child] for child in children[:1]]] = 0.0
        return [float(p[tree.tokens[child]]) for child in children], rest if total_mass(rest) > 0 else p

    patch.setattr(ordered_module, "_reject_children", broken)


def duplicates_are_tested_again(patch: Patch) -> None:
    """A token that is listed twice has the same chance both times."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        thresholds, rest = rounds(tree, node)
        first: dict[int, float] = {}
        tokens = [tree.tokens[child] for child in tree.children[node]]
        return [first.setdefault(token, limit) for token, limit in zip(tokens, thresholds, strict=True)], rest

    patch.setattr(ordered_module, "_reject_children", broken)


def dist_of_a_sibling(patch: Patch) -> None:
    """The target's distribution after a node is the one after its first sibling."""
    target = DenseTrees.target

    def broken(tree: DenseTrees, node: int) -> Tensor:
        parent = tree.parents[node]
        return target(tree, node if parent < 0 else tree.children[parent][0])

    patch.setattr(DenseTrees, "target", broken)


MUTANTS: list[tuple[str, Callable[[Patch], None]]] = [
    ("recursive_rejection", unconditioned_siblings),
    ("recursive_rejection", unconditioned_hybrid),
    ("recursive_rejection", chosen_taken_for_drawn),
    ("recursive_rejection", siblings_see_the_first_dist),
    ("recursive_rejection", resample_from_p),
    ("recursive_rejection", normalised_before_the_difference),
    ("recursive_rejection", every_path_draws_for_itself),
    ("recursive_rejection", duplicates_are_tested_again),
    ("recursive_rejection", dist_of_a_sibling),
    ("traversal", unconditioned_siblings),
    ("traversal", unconditioned_hybrid),
    ("traversal", chosen_taken_for_drawn),
    ("traversal", dist_of_a_sibling),
    ("traversal", resample_from_p),
    ("traversal", reach_is_not_updated),
    ("traversal", reach_is_forgotten_in_the_residual),
    ("traversal", reach_is_the_ratio_alone),
    ("traversal", coins_from_the_root),
]


@pytest.mark.parametrize(("rule", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_exact_distribution_notices(rule: str, mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    found, order = get_rule(rule), "ordered" if rule == "recursive_rejection" else "post"
    noticed = 0
    mutant(monkeypatch)
    with use_backend("reference"), torch.inference_mode():
        for case in CASES[:: len(CASES) // 90]:
            try:
                check_dist(case, found, order)  # type: ignore[arg-type]
            except AssertionError:
                noticed += 1
            if noticed == 2:
                return
    raise AssertionError(f"noticed by {noticed} small trees; expected at least 2")

"""Known mistakes in tree verification, planted into the reference operators one at a time.

The exact distributions of oracles.tree_cases must detect each of them. `MUTANTS` lists the rule of each mutant.
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
rejection_module: Any = import_module(
    "specdec_kernels.ops.recursive_rejection_verify.reference"
)  # the attribute is the operator
traversal_module: Any = import_module("specdec_kernels.ops.traversal_verify.reference")
proposal = DenseTrees.proposal
reject_children, visit = rejection_module._reject_children, traversal_module._visit_node


def _ignore_exclusions(patch: Patch, kind: int) -> None:
    """Tests nodes of one kind against the whole draft distribution, as if no token were excluded."""

    def broken(tree: DenseTrees, parent: int, place: int) -> Tensor | None:
        node = tree.children[parent][place]
        kept = tree.kinds[node]
        if kept == kind:
            tree.kinds[node] = 1
        try:
            return proposal(tree, parent, place)
        finally:
            tree.kinds[node] = kept

    patch.setattr(DenseTrees, "proposal", broken)


def unconditioned_siblings(patch: Patch) -> None:
    """Siblings sampled without replacement are tested against the whole draft distribution."""
    _ignore_exclusions(patch, SAMPLED_WITHOUT_EARLIER)


def unconditioned_hybrid(patch: Patch) -> None:
    """The sampled child of a hybrid node is tested against the whole draft distribution."""
    _ignore_exclusions(patch, SAMPLED_WITHOUT_DETERMINISTIC)


def deterministic_taken_for_sampled(patch: Patch) -> None:
    """A deterministic token is tested with the target's distribution as q, so it is always accepted."""

    def broken(tree: DenseTrees, parent: int, place: int) -> Tensor | None:
        node = tree.children[parent][place]
        return tree.target(parent) if tree.kinds[node] == DETERMINISTIC else proposal(tree, parent, place)

    patch.setattr(DenseTrees, "proposal", broken)


def residual_is_not_updated(patch: Patch) -> None:
    """Every child is tested against the target's distribution instead of the residual of its earlier siblings."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        thresholds, rest = reject_children(tree, node)
        p = tree.target(node)
        for place, child in enumerate(tree.children[node]):
            dist = tree.proposal(node, place)
            if dist is not None:
                thresholds[place] = min(1.0, float(p[tree.tokens[child]]) / float(dist[tree.tokens[child]]))
        return thresholds, rest

    patch.setattr(rejection_module, "_reject_children", broken)


def resample_from_p(patch: Patch) -> None:
    """After all children are rejected, the next token is sampled from p instead of the residual."""
    patch.setattr(
        rejection_module, "_reject_children", lambda tree, node: (reject_children(tree, node)[0], tree.target(node))
    )
    patch.setattr(
        traversal_module, "_visit_node", lambda tree, node, reach: (*visit(tree, node, reach)[:2], tree.target(node))
    )


def reach_is_not_updated(patch: Patch) -> None:
    """A node's reach probability is not updated after its subtree is rejected."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        of_children, _, rest = visit(tree, node, reach)
        return of_children, reach, rest

    patch.setattr(traversal_module, "_visit_node", broken)


def residual_without_reach(patch: Patch) -> None:
    """The residual is (p - q)+ instead of (w p - q)+, for the reach w."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        of_children, after, _ = visit(tree, node, reach)
        return of_children, after, visit(tree, node, 1.0)[2]

    patch.setattr(traversal_module, "_visit_node", broken)


def reach_without_the_parent(patch: Patch) -> None:
    """The reach of a child is p / q alone, without the factor of its parent."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        return visit(tree, node, 1.0)[0], *visit(tree, node, reach)[1:]

    patch.setattr(traversal_module, "_visit_node", broken)


def thresholds_of_the_walk_from_the_root(patch: Patch) -> None:
    """Traversal compares the uniforms with the thresholds of recursive rejection."""

    def broken(tree: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
        thresholds, rest = reject_children(tree, node)
        return thresholds, reach, rest

    patch.setattr(traversal_module, "_visit_node", broken)


def residual_is_not_normalised(patch: Patch) -> None:
    """The residual is not normalised before the next sibling's distribution is subtracted."""

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

    patch.setattr(rejection_module, "_reject_children", broken)


def every_path_samples_for_itself(patch: Patch) -> None:
    """Paths sample separate tokens at a node that they share, and the first matching path wins."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        p, children = tree.target(node), tree.children[node]
        rest = p.clone()
        rest[[tree.tokens[child] for child in children[:1]]] = 0.0
        return [float(p[tree.tokens[child]]) for child in children], rest if total_mass(rest) > 0 else p

    patch.setattr(rejection_module, "_reject_children", broken)


def duplicates_are_tested_again(patch: Patch) -> None:
    """A token that occurs twice among siblings is accepted with the same probability both times."""

    def broken(tree: DenseTrees, node: int) -> tuple[list[float], Tensor]:
        thresholds, rest = reject_children(tree, node)
        first: dict[int, float] = {}
        tokens = [tree.tokens[child] for child in tree.children[node]]
        return [first.setdefault(token, limit) for token, limit in zip(tokens, thresholds, strict=True)], rest

    patch.setattr(rejection_module, "_reject_children", broken)


def dist_of_a_sibling(patch: Patch) -> None:
    """The target's distribution after a node is that after its first sibling."""
    target = DenseTrees.target

    def broken(tree: DenseTrees, node: int) -> Tensor:
        parent = tree.parents[node]
        return target(tree, node if parent < 0 else tree.children[parent][0])

    patch.setattr(DenseTrees, "target", broken)


MUTANTS: list[tuple[str, Callable[[Patch], None]]] = [
    ("recursive_rejection", unconditioned_siblings),
    ("recursive_rejection", unconditioned_hybrid),
    ("recursive_rejection", deterministic_taken_for_sampled),
    ("recursive_rejection", residual_is_not_updated),
    ("recursive_rejection", resample_from_p),
    ("recursive_rejection", residual_is_not_normalised),
    ("recursive_rejection", every_path_samples_for_itself),
    ("recursive_rejection", duplicates_are_tested_again),
    ("recursive_rejection", dist_of_a_sibling),
    ("traversal", unconditioned_siblings),
    ("traversal", unconditioned_hybrid),
    ("traversal", deterministic_taken_for_sampled),
    ("traversal", dist_of_a_sibling),
    ("traversal", resample_from_p),
    ("traversal", reach_is_not_updated),
    ("traversal", residual_without_reach),
    ("traversal", reach_without_the_parent),
    ("traversal", thresholds_of_the_walk_from_the_root),
]


@pytest.mark.parametrize(("rule", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_exact_distribution_detects_the_mutant(
    rule: str, mutant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    found, order = get_rule(rule), "ordered" if rule == "recursive_rejection" else "post"
    detected = 0
    mutant(monkeypatch)
    with use_backend("reference"), torch.inference_mode():
        for case in CASES[:: len(CASES) // 90]:
            try:
                check_dist(case, found, order)  # type: ignore[arg-type]
            except AssertionError:
                detected += 1
            if detected == 2:
                return
    raise AssertionError(f"detected on {detected} small trees; expected at least 2")

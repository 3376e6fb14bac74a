"""Interface of verification rules. Tests: tests/test_interfaces.py."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces.step_values import Acceptance, Needs, Rng
from specdec_kernels import TreePlan


@runtime_checkable
class Rule(Protocol):
    """Accepts a path of each draft and adds one token. A pure function of its arguments.

    Attributes:
        name: Key of the rule: the name of its module, or a name with options such as "lossy:lenience=0.5".
        lossless: The emitted text has the target's distribution.
        replays: The emitted text is a function of the seed alone, whatever was drafted.
        uses_q: The rule reads the distributions of sampled draft tokens. None of these tokens may then be dropped
            before verification.
        prefers: How a draft model should pick its tokens for this rule: "greedy", "coupled" or "sampled".
    """

    name: str
    lossless: bool
    replays: bool
    uses_q: bool
    prefers: str

    def why_not(self, needs: Needs) -> str | None:
        """Returns why the rule cannot verify the drafts of a drafter, in one sentence, or None if it can.

        A rule that inherits from this class verifies the drafts of every drafter unless it overrides the method.
        """
        return None

    def why_not_sampling(self, params: Any) -> str | None:
        """Returns why the rule cannot serve a request, in one sentence, or None if it can.

        A rule that inherits from this class serves every request unless it overrides the method.

        Args:
            params: The request's `SamplingParams`.
        """
        return None

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        """Verifies a draft.

        Args:
            draft: Packed trees of M nodes, with the distributions of sampled tokens.
            plan: Depths, ancestors and links of the nodes.
            target_dists: The target's distribution after each node, M rows.
            rng: Keys of the random numbers, [B].

        Returns:
            The accepted path and the next token of each request.
        """
        ...


class ThresholdRule(Rule, Protocol):
    """A rule that compares one uniform per node with a threshold, and shows both.

    Tests and the lab enumerate its outcomes exactly.

    Attributes:
        from_leaves: The path ends at the first node in post-order whose uniform passes. Otherwise it ends at the last
            node of a walk from the root.
    """

    from_leaves: bool

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        """Verifies a draft as `Rule.__call__` does.

        Args:
            draft: Packed trees of M nodes.
            plan: Depths, ancestors and links of the nodes.
            target_dists: The target's distribution after each node, M rows.
            rng: Keys of the random numbers, [B].
            uniforms: Uniforms of all nodes in (0, 1), float32 [M], in place of the keyed ones.

        Returns:
            The accepted path and the next token of each request.
        """
        ...

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        """Computes what the uniforms are compared with. A function of draft and distributions alone.

        Args:
            draft: Packed trees of M nodes.
            plan: Depths, ancestors and links of the nodes.
            target_dists: The target's distribution after each node, M rows.

        Returns:
            Thresholds [M] and residuals [M, V]. Node i passes if its uniform is strictly below `thresholds[i]`, given
            that the rule tests it. `residuals[i]` are the unnormalised probabilities of the next token if the path ends
            at node i.
        """
        ...


def has_thresholds(rule: Rule) -> TypeGuard[ThresholdRule]:
    """Returns whether a rule is a `ThresholdRule`.

    Wrappers that forward attributes to another rule (`__getattr__`) count as that rule.
    """
    return hasattr(rule, "thresholds")

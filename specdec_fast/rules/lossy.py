"""Lossy: two rules that do NOT keep the target's law, for comparison only. Refused unless asked for by this name.

`lossy` (or `lossy:epsilon=0.09,delta=0.3`) is typical acceptance (Cai et al. 2024, Medusa, section 2.3.2): a token is
kept when its probability is above min(epsilon, delta * exp(-entropy)), and of all such paths the longest. `lossy:
lenience=0.5` is lenience (Leviathan et al. 2023, appendix A.5): the token rule with q multiplied by l < 1, so that no
token comes more often than p / l (tokens that were chosen have no q, and are tested as by `token`). At temperature 0
both are greedy. Tests: tests/rules/test_lossy.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.laws import Laws
from specdec_fast.rules.token import chain_coins, verify_chains
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan, typical_verify

Cells = tuple[Tensor, Tensor]
"""(threshold [M], residual [M, V])"""


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance. Lossy. Any tree; q is not used."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: str = ""
    lossless: bool = field(default=False, init=False)
    replays: bool = field(default=False, init=False)
    uses_q: bool = field(default=False, init=False)
    prefers: str = field(default="greedy", init=False)

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 <= value <= 1:
                raise ValueError(f"rule lossy {name}: got {value}; expected a number from 0 to 1")
        usual = (self.epsilon, self.delta) == (0.09, 0.3)
        options = "" if usual else f":epsilon={self.epsilon:g},delta={self.delta:g}"
        object.__setattr__(self, "name", self.name or f"lossy{options}")

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return self._kept(draft, plan, target_laws, rng.seeds, rng.positions)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> Cells:
        """1 on the longest path of tokens that are typical, 0 elsewhere; and the target's own weights."""
        rows = draft.offsets[1:]
        path = self._kept(draft, plan, target_laws, rows.long(), rows).path.long()
        weights = target_laws.weights()
        accept = weights.new_zeros(draft.num_nodes)
        accept[path[path >= 0]] = 1.0
        return accept, weights

    def _kept(self, draft: Draft, plan: TreePlan, laws: Laws, seeds: Tensor, positions: Tensor) -> Acceptance:
        links = (draft.tokens, draft.offsets, plan.first_child, plan.next_sibling)
        limit = {"epsilon": self.epsilon, "delta": self.delta}
        target = (laws.logits, *laws.stats)
        return Acceptance(
            *typical_verify(*links, target, draft.scouts, seeds, positions, max_depth=draft.max_depth, **limit)
        )


@dataclass(frozen=True, slots=True)
class Lenience:
    """Lenience. Lossy. Chains."""

    lenience: float = 0.5
    name: str = ""
    lossless: bool = field(default=False, init=False)
    replays: bool = field(default=False, init=False)
    uses_q: bool = field(default=True, init=False)
    prefers: str = field(default="drawn", init=False)

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ValueError(
                f"rule lossy lenience: got {self.lenience}; expected a number above 0, up to 1 (rule token)"
            )
        object.__setattr__(self, "name", self.name or f"lossy:lenience={self.lenience:g}")

    def why_not(self, needs: Needs) -> str | None:
        if needs.topology != "chain":
            return "rule lossy:lenience: got a drafter that proposes trees; expected chains, or lossy (typical)"
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        return verify_chains("token", self._lenient(draft), target_laws, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> Cells:
        """min(1, p(x) / (l q(x))), and the positive part of p - l q."""
        return chain_coins("token", self._lenient(draft), target_laws)

    def _lenient(self, draft: Draft) -> Draft:
        """The draft with l q in place of q: a larger log-normaliser."""
        if not draft.is_chain:
            raise ValueError("rule lossy:lenience: got a tree; expected chains, or lossy (typical)")
        draft.refuse_dropped(self.name)
        q = draft.laws
        if q is None:
            return draft
        scaled = Laws(q.logits, q.inv_t, q.lse - math.log(self.lenience), q.cut, q.tie_id, q.token_ids)
        return replace(draft, laws=scaled)


def with_options(name: str, options: str) -> Typical | Lenience:
    """The rule that `lossy:<options>` names, for example `lenience=0.5` or `epsilon=0.1,delta=0.3`.

    Raises ValueError for options that it does not have.
    """
    given: dict[str, float] = {}
    for part in options.split(","):
        key, _, value = part.partition("=")
        try:
            given[key.strip()] = float(value)
        except ValueError:
            raise ValueError(f"rule {name}: got option {part!r}; expected a number, as in lossy:lenience=0.5") from None
    if set(given) == {"lenience"}:
        return Lenience(given["lenience"], name=name)
    if not set(given) <= {"epsilon", "delta"}:
        raise ValueError(f"rule {name}: got options {sorted(given)}; expected lenience, or epsilon and delta")
    return Typical(**given, name=name)


RULE = Typical()

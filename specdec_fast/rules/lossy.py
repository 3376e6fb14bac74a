"""Lossy: two rules that do NOT keep the target's law, for comparison only. Refused unless asked for by this name.

`lossy` (or `lossy:epsilon=0.09,delta=0.3`) is typical acceptance (Cai et al. 2024, Medusa, section 2.3.2): a token is
kept when its probability is above min(epsilon, delta * exp(-entropy)), and of all such paths the longest. `lossy:
lenience=0.5` is lenience (Leviathan et al. 2023, appendix A.5): the token rule with q multiplied by l < 1, so that no
token comes more often than p / l. At temperature 0 both are greedy. Plain PyTorch. Tests: tests/rules/test_lossy.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.laws import Laws
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan
from specdec_kernels.random import ACCEPT, RECOVER, draw_from_weights, uniform, words

Cells = tuple[Tensor, Tensor]
"""(threshold [M], residual [M, V])"""


def _children(plan: TreePlan, draft: Draft) -> list[list[int]]:
    """Proposals below every node, in index order; scouts are none."""
    first, sibling = plan.first_child.tolist(), plan.next_sibling.tolist()
    scout = [False] * len(first) if draft.scouts is None else draft.scouts.tolist()
    found: list[list[int]] = [[] for _ in first]
    for node, child in enumerate(first):
        while child >= 0:
            if not scout[child]:
                found[node].append(child)
            child = sibling[child]
    return found


def _walk(cells: Cells, draft: Draft, plan: TreePlan, rng: Rng, uniforms: Tensor | None) -> Acceptance:
    """From every root to the first child whose coin passes, as long as there is one; then a token of the residual."""
    threshold, residual = cells
    children = _children(plan, draft)
    if uniforms is None:
        place = torch.arange(draft.num_nodes, device=draft.row_of.device) - draft.offsets.long()[draft.row_of]
        uniforms = uniform(words(rng.seeds[draft.row_of], rng.positions[draft.row_of], place, ACCEPT, 0))
    passed = (uniforms < threshold).tolist()
    paths = []
    for start, count in zip(draft.offsets.tolist(), draft.counts):
        nodes, node = [], start if count else -1
        while node >= 0:
            nodes.append(node)
            node = next((child for child in children[node] if passed[child]), -1)
        paths.append(nodes)
    width = draft.max_depth + 1
    device = draft.tokens.device
    path = torch.tensor([each + [-1] * (width - len(each)) for each in paths], dtype=torch.int32, device=device)
    path = path.reshape(len(paths), width)
    accepted = torch.tensor([max(len(each) - 1, 0) for each in paths], dtype=torch.int32, device=device)
    last = path.gather(1, accepted[:, None].long()).squeeze(1).long()
    token = draw_from_weights(residual[last.clamp(min=0)], rng.seeds, rng.positions, accepted, RECOVER)
    return Acceptance(path, accepted, torch.where(last >= 0, token, -1))


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
        return _walk(self.thresholds(draft, plan, target_laws), draft, plan, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> Cells:
        """1 on the longest path of tokens that are typical, 0 elsewhere; and the target's own weights."""
        weights = target_laws.weights()
        entropy = -torch.special.xlogy(weights, weights).sum(1)
        limit = (self.delta * (-entropy).exp()).clamp(max=self.epsilon).tolist()
        children, token = _children(plan, draft), draft.tokens.tolist()
        offsets, found = draft.offsets.tolist(), torch.zeros(draft.num_nodes, dtype=weights.dtype)
        for start, stop in zip(offsets, offsets[1:]):
            longest: dict[int, list[int]] = {}
            for node in reversed(range(start, stop)):  # children come after their parents
                typical = [child for child in children[node] if float(weights[node, token[child]]) > limit[node]]
                longest[node] = [node, *max((longest[child] for child in typical), key=len, default=[])]
            if stop > start:
                found[longest[start]] = 1.0
        return found.to(weights.device), weights


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
        return _walk(self.thresholds(draft, plan, target_laws), draft, plan, rng, uniforms)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> Cells:
        """min(1, p(x) / (l q(x))), and the positive part of p - l q."""
        if not draft.is_chain:
            raise ValueError("rule lossy:lenience: got a tree; expected chains, or lossy (typical)")
        draft.refuse_dropped(self.name)
        weights = target_laws.weights()
        rest, found = weights.clone(), torch.zeros(draft.num_nodes, dtype=weights.dtype, device=weights.device)
        drawn, source, token = draft.drawn.tolist(), draft.law_row.tolist(), draft.tokens.tolist()
        laws = None if draft.laws is None else draft.laws.weights().to(weights.dtype)
        columns = None if draft.laws is None else draft.laws.token_ids
        offsets = draft.offsets.tolist()
        for start, stop in zip(offsets, offsets[1:]):
            for node in range(start + 1, stop):
                q = torch.zeros_like(weights[0])
                if not drawn[node]:
                    q[token[node]] = 1.0
                elif laws is not None and columns is not None:
                    q[columns] = laws[source[node]]
                elif laws is not None:
                    q[: laws.shape[1]] = laws[source[node]]
                offered = self.lenience * float(q[token[node]])
                found[node] = min(1.0, float(weights[node - 1, token[node]]) / offered) if offered > 0 else 0.0
                left = (weights[node - 1] - self.lenience * q).clamp(min=0.0)
                rest[node - 1] = left if float(left.sum()) > 0 else weights[node - 1]
        found[draft.offsets[:-1][draft.offsets[:-1] < draft.offsets[1:]].long()] = 1.0
        return found, rest


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

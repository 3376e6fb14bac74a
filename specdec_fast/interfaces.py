"""The four seams of the engine: Target, KVCache, Drafter, Rule, and the small values that cross them.

A class that satisfies a protocol needs no base class. Nothing here computes. Nobody writes to a value; those that every
step makes are not frozen, because freezing takes some microseconds of each. Tests: tests/test_interfaces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.sampling.pipeline import Sampling
from specdec_kernels import TreePlan


@dataclass(slots=True, eq=False)
class Acceptance:
    """What a rule answers.

    path: int32 [B, D+1] accepted node indices on the packed axis, root first, -1 padded; num_accepted: int32 [B],
    root not counted; next_token: int64 [B] recovered (after a rejection) or bonus (all accepted); node_choice:
    int64 [M] the target's own choice at every node (replay and greedy), score-only nodes included, or None; accepted:
    the same as num_accepted where the host has read it (of a text that breaks off no more than is sound), else None.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    node_choice: Tensor | None = None
    num_accepted_host: tuple[int, ...] | None = None

    def read_num_accepted(self) -> Sequence[int]:
        """How many were accepted of each row, as host integers."""
        return self.num_accepted.tolist() if self.num_accepted_host is None else self.num_accepted_host


@dataclass(slots=True, eq=False)
class Rng:
    """Where a step stands in the keyed randomness: seeds int64 [B], positions int32 [B] absolute, of the roots. Both
    are remembered and shared: nobody writes to them.

    first_draw: number of the first draw that the drafter may make in this step. Every draw has a number of its own,
    also when several drafters share a step: two draws of one number come from the same noise.
    """

    seeds: Tensor
    positions: Tensor
    first_draw: int = 0

    def replay_noise_keys(self, sampling: Sampling, pick: str) -> list[tuple[int, int] | None]:
        """Per row the seed and the root's position, by which a drafter that picks "coupled" finds the noise of `replay`
        on the host; None for other ways to pick and at temperature 0.
        """
        if pick != "coupled" or sampling.all_greedy:
            return [None] * self.seeds.shape[0]
        keys = zip(self.seeds.tolist(), self.positions.tolist(), sampling.temperature.tolist())
        return [(seed, position) if temperature else None for seed, position, temperature in keys]


@dataclass(slots=True, eq=False)
class TargetOutput:
    """logits: [N, V] of the nodes that were asked for, or None; auxiliary hidden states: hidden states [M, hidden]
    by name.
    """

    logits: Tensor | None
    aux_hidden_states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Slots:
    """Where M staged nodes of B rows live: all the attention of one forward pass needs to know.

    page_table: int32 [B, P]; lengths: int32 [B] committed tokens; offsets: int32 [B+1]; slots: int64 [M] flat slot
    ids; positions: int64 [M]; ancestors: int32 [M, W] or None (causal chains); depth: int32 [M] or None (causal).
    """

    page_table: Tensor
    lengths: Tensor
    offsets: Tensor
    slots: Tensor
    positions: Tensor
    ancestors: Tensor | None = None
    depth: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter, rule or request asks of the engine: capabilities, never identities.

    topology: the shape of its drafts; auxiliary hidden states: hidden states wanted from the target ("entering:i",
    "final_norm"), of prompts and of every step; prompt_aux_hidden_states: those wanted of prompts only, which leaves
    the steps as they are; host_tokens: reads committed tokens on the host (forces the `sync` step mode);
    node_choices: wants the target's choice at every node; logits: learns from the target's logits when it observes;
    distributions: its tokens are drawn and carry distributions; partial_dists: these are over part of the vocabulary;
    excludes: they are drawn outside their chosen siblings, so no sibling may come from elsewhere; shared: what is
    drafted for a request may follow from texts or acceptance of others, so under rules that toss coins each request
    needs coins of its own; vocab_size: the ids that its own model drafts are below it, and so must be the target's;
    None if it drafts what the target knows.
    """

    topology: Literal["chain", "tree"] = "chain"
    aux_hidden_states: tuple[str, ...] = ()
    prompt_aux_hidden_states: tuple[str, ...] = ()
    host_tokens: bool = False
    own_cache: bool = False
    partial_layers: bool = False
    node_choices: bool = False
    logits: bool = False
    dists: bool = False
    partial_dists: bool = False
    excludes: bool = False
    shared: bool = False
    vocab_size: int | None = None


@dataclass(slots=True)
class Budget:
    """How many draft nodes (root not counted) each row may propose this step: host integers, one per row.

    Fixed before anything is drawn, from committed data alone: whoever makes one has no draft to look at.
    """

    nodes: Sequence[int]


class StateView(Protocol):
    """Read-only sight of what is committed. Drafters get this and nothing newer."""

    @property
    def device(self) -> torch.device: ...

    def tokens(self, row: int) -> Sequence[int]: ...
    def length(self, row: int) -> int: ...
    def prompt_length(self, row: int) -> int: ...
    def sampling(self, rows: Sequence[int]) -> Sampling: ...


@runtime_checkable
class KVCache(Protocol):
    """Seam 2. Transactional: stage, then commit a path or forget; lengths are absolute."""

    lengths: Tensor

    def stage(
        self, rows: Tensor, offsets: Tensor, num_nodes: int, plan: TreePlan | None = None, *, advance: bool = False
    ) -> Slots: ...
    def commit(
        self,
        rows: Tensor,
        slots: Slots,
        path: Tensor,
        num_accepted: Tensor,
        chains: Sequence[int] | None = None,
    ) -> None: ...
    def rollback(self, rows: Tensor | Sequence[int], lengths: Tensor | Sequence[int]) -> None: ...
    def claim(self, owner: object, rows: Collection[int] = ()) -> None: ...
    def reserve(self, row: int, length: int) -> bool: ...
    def release(self, rows: Sequence[int]) -> None: ...


@runtime_checkable
class Target(Protocol):
    """Seam 1. A model that scores packed trees over a cache of its own."""

    vocab_size: int

    @property
    def cache(self) -> KVCache: ...

    def extend(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        *,
        logits: bool | Tensor,
        aux_hidden_states: Sequence[str] = (),
    ) -> TargetOutput: ...
    def score(
        self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()
    ) -> tuple[TargetOutput, Slots]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter can be made of where names are turned into an engine.

    target: what it drafts for; tokenizer: the target's, or None; draft: opens the draft model that was given, None when
    none was; prefers: how the rule at hand wants a draft model's tokens picked (`Rule.prefers`); make: another drafter
    of the same parts, by name and options.
    """

    target: Target
    tokenizer: Any
    draft: Callable[[], Target] | None
    prefers: str
    make: Callable[..., Drafter]


@runtime_checkable
class Drafter(Protocol):
    """Seam 3. Four verbs; rows join by `begin` and leave by `release` at any step.

    What keeps the text lossless under rules that use the draft's distributions (`Rule.uses_q`): `propose` sees
    committed data and a budget; whether a node is drawn at all may depend on these and on the tokens drawn before it;
    a token that was drawn is in the draft, with its distribution, and is no score-only node. Pruning after drawing is
    for chosen tokens, or for rules that do not look at q.

    A class may add `from_parts(parts, **options)`, a class method that makes one out of `Parts`, and say with
    `by_rule(prefers)`, a static method, which defaults of its options that sets, for `specdec drafters`, and with
    `takes_draft = True` that it wants a draft model; a class without is made by `cls(**options)`. Its class attribute
    `needs` holds for the default options; `draws = True` says that others make it draw tokens from distributions,
    `may_take_draft = True` that some options have a use for a draft model, and `apart` names options with which it
    does not need `excludes`.
    """

    name: str
    needs: Needs

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None: ...
    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft: ...
    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None: ...
    def release(self, rows: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class CudaGraphRows:
    """The batch of a captured step, all of it on the device. rows: int32 [B], all different; lengths: int32 [B]
    committed tokens; drafts: int32 [B] draft nodes wanted, at most num_draft_tokens, 0 for rows that do not draft;
    tokens: int64 [R, L], the committed tokens of every row; sampling: of the B rows.
    """

    rows: Tensor
    lengths: Tensor
    drafts: Tensor
    tokens: Tensor
    sampling: Sampling
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class CudaGraphTrees:
    """Chosen draft nodes of B rows behind their roots, K places each. tokens: int64 [B, K]; parents: int32 [B, K], by
    their index in the tree, where 0 is the root, parents first, or None for chains; counts: int32 [B], how many of a
    row's are there, the first ones, at most its `drafts`; depth: a bound on that of any node, on the host.
    """

    tokens: Tensor
    parents: Tensor | None
    counts: Tensor
    depth: int


@runtime_checkable
class CudaGraphProposals(Protocol):
    """What a drafter's method `captured(max_rows)` answers with when its proposals can be part of a captured step (else
    one sentence that says why not). `propose` and `observe` run while a step is captured: they ask the device nothing
    and make no shape depend on data. The other verbs run on the host, between steps.

    auxiliary hidden states: hidden states wanted from the target in `observe`, where rows without nodes have a path
    of -1; enter: rows join, with what is committed, again after it failed; reserve: whether a row may hold so many
    tokens; leave: rows go back to steps that are not captured, with what is committed: a step may have failed half-way.
    """

    aux_hidden_states: tuple[str, ...]

    def enter(self, view: StateView, rows: Sequence[int]) -> None: ...
    def reserve(self, row: int, length: int) -> bool: ...
    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees: ...
    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None: ...
    def leave(self, view: StateView, rows: Sequence[int]) -> None: ...


@runtime_checkable
class Rule(Protocol):
    """Seam 4. A pure function of its arguments.

    lossless: the emitted text has the target's distribution; replays: the text is a function of the seed alone,
    whatever was drafted; uses_q: reads the distributions that drawn tokens came from, so none of them may be dropped
    before verification; prefers: how a draft model should pick its tokens for this rule ("greedy", "coupled" or
    "sampled").
    """

    name: str
    lossless: bool
    replays: bool
    uses_q: bool
    prefers: str

    def why_not(self, needs: Needs) -> str | None: ...
    def why_not_sampling(self, params: Any) -> str | None: ...
    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance: ...


class ThresholdRule(Rule, Protocol):
    """A rule that tosses one coin per node: the coins can be given, and what they are compared with can be seen.

    Called with `uniforms` (float32 [M] in (0, 1)) a rule takes these in place of its keyed coins. `thresholds` answers
    with (threshold [M], residual [M, V]): the coin of node i passes iff it is strictly below threshold[i], given that
    the rule looks at it; residual[i] are the unnormalised weights of the next token when the accepted path ends at
    node i. Both are functions of the draft and the target's distributions alone. from_leaves: the path ends at the
    first node in post-order whose coin passes, not at the last one of a walk from the root.
    """

    from_leaves: bool

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance: ...
    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]: ...


def shows_thresholds(rule: Rule) -> TypeGuard[ThresholdRule]:
    """Whether a rule is a `ThresholdRule`: one that passes calls on to another (`__getattr__`) is what the other is."""
    return hasattr(rule, "thresholds")

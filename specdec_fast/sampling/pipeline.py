"""What the target's distribution is: sampling parameters, and `process`, the one owner of logits ->
`TokenDistributions` at every node.

Order: penalties (repetition, frequency, presence), bias and banned tokens (minimum length too), forced tokens, allowed
tokens and grammar, temperature, top-k, top-p, min-p. Tests: tests/sampling/test_pipeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.sampling.grammar import Guide
from specdec_fast.sampling.logits_processors import LogitsProcessors, TokenCounts, has_penalties, pack_processors
from specdec_fast.sampling.params import SamplingParams as SamplingParams
from specdec_kernels import NodePaths, Overlay, TreePlan, distribution_stats, replay_sample


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of B rows as tensors [B], ready to be gathered per node.

    `edits` is what the rows change in logits before temperature, or None: then nothing is done for it. all_greedy:
    every row is at T = 0; any_greedy: some row may be; any_filter: some row is greedy or has top-k, top-p or min-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    edits: LogitsProcessors | None = None
    all_greedy: bool = False
    any_greedy: bool = True
    any_filter: bool = True
    _per_node: dict[tuple[int, ...], Sampling] = field(default_factory=dict, repr=False, compare=False)
    _kept_whole: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def dists(self, logits: Tensor, overlay: Overlay | None = None) -> TokenDistributions:
        """The distributions of logits [B, V], one row of logits per row of the batch, with an overlay if there is
        one.
        """
        asked = (self.temperature, self.top_k, self.top_p, self.min_p)
        over = {} if overlay is None else {"overlay": overlay}
        inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *asked, masses=True, **over)
        return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass, overlay=overlay)

    def pending(self, logits: Tensor) -> PendingDistributions:
        """The same, for a rule that may not need all of them."""
        return PendingDistributions(logits, (self.temperature, self.top_k, self.top_p, self.min_p))

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The token, int64 [B], that logits [B, V] give at `positions` (int32 [B]) under the replay noise.

        The same token as replay_sample over `dists`, without reading the rows twice where nothing is filtered.
        """
        if self.all_greedy:
            return logits.argmax(1)
        if self.any_filter:
            dists = self.dists(logits)
            return replay_sample(logits, dists.inv_t, dists.cut, dists.tie_id, self.seeds, positions)
        inv_t, cut, tie = self.unfiltered(logits)
        return replay_sample(logits, inv_t, cut, tie, self.seeds, positions)

    def unfiltered(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1/T, cut, tie) of distributions that keep every token, remembered. Rows at temperature 0 are taken at 1."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        key = (wide, logits.shape[1])
        found = self._kept_whole.get(key)
        if found is None:
            inv_t = 1.0 / torch.where(self.temperature == 0, 1.0, self.temperature).to(wide)
            tie = torch.full_like(self.top_k, logits.shape[1] - 1)
            found = self._kept_whole[key] = (inv_t, torch.full_like(inv_t, float("-inf")), tie)
        return found

    def per_node(self, counts: tuple[int, ...], row_of: Tensor) -> Sampling:
        """Each row's parameters repeated for its nodes. counts: nodes per row; row_of: int64 [M] row of each node.

        Remembered per shape: most steps of a batch repeat one.
        """
        found = self._per_node.get(counts)
        if found is None:
            if len(self._per_node) > 256:
                self._per_node.clear()
            found = self._per_node[counts] = self.spread(row_of)
        return found

    def spread(self, row_of: Tensor) -> Sampling:
        """The parameters of the rows in `row_of`, int64 [M]."""
        fields = ("temperature", "top_k", "top_p", "min_p", "seeds")
        return Sampling(*(getattr(self, name)[row_of] for name in fields))


@dataclass(slots=True)
class SamplingTable:
    """Sampling parameters of every row of a decode state; packs those of the rows asked for.

    `followed` holds the rows whose generated tokens it must hear of (`append`): those with penalties or a grammar.
    """

    device: torch.device
    followed: set[int] = field(default_factory=set)
    _rows: dict[int, tuple[SamplingParams, int, tuple[int, ...]]] = field(default_factory=dict)
    _packed: dict[tuple[int, ...], Sampling] = field(default_factory=dict)
    _guides: dict[int, Guide] = field(default_factory=dict)
    _counts: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self._counts = TokenCounts(self.device)

    def set(
        self,
        row: int,
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Sequence[int],
        tokens: Sequence[int] = (),
    ) -> None:
        """Row `row` now follows `params` (which must carry a seed). tokens: what is committed, prompt first."""
        if params.seed is None:
            raise ValueError("SamplingTable.set: got params without a seed; call params.with_seed() first")
        self.clear(row)
        self._rows[row] = (params, prompt_length, tuple(stop_ids))
        if has_penalties(params):
            self._counts.join(row, tokens[:prompt_length], tokens[prompt_length:])
            self.followed.add(row)
        if params.grammar is not None:
            self._guides[row] = Guide(params.grammar, stop_ids, tokens[prompt_length:])
            self.followed.add(row)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens were generated in a row that is `followed`."""
        if row in self._counts and tokens:
            self._counts.append(row, tokens)
        if row in self._guides:
            self._guides[row].push(tokens)

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)
        self._packed.clear()
        self.followed.discard(row)
        self._counts.leave(row)
        self._guides.pop(row, None)

    def entry(self, row: int) -> tuple[SamplingParams, int, tuple[int, ...]]:
        """A row's parameters, the length of its prompt and the ids that end it."""
        return self._rows[row]

    def pack(self, rows: Sequence[int]) -> Sampling:
        """The parameters of `rows`, in order. Packed anew only when the batch changed."""
        key = tuple(rows)
        found = self._packed.get(key)
        if found is None:
            if len(self._packed) > 64:
                self._packed.clear()
            found = self._packed[key] = self._pack(key)
        return found

    def _pack(self, rows: tuple[int, ...]) -> Sampling:
        entries = [self._rows[row] for row in rows]
        params = [entry[0] for entry in entries]

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return host_to_device(values, dtype, self.device)

        return Sampling(
            temperature=tensor([p.temperature for p in params], torch.float32),
            top_k=tensor([p.top_k for p in params], torch.int32),
            top_p=tensor([p.top_p for p in params], torch.float32),
            min_p=tensor([p.min_p for p in params], torch.float32),
            seeds=tensor([p.seed for p in params], torch.int64),
            all_greedy=all(p.temperature == 0 for p in params),
            any_greedy=any(p.temperature == 0 for p in params),
            any_filter=any(p.temperature == 0 or p.top_k or p.top_p < 1 or p.min_p for p in params),
            edits=pack_processors(
                rows,
                params,
                [entry[1] for entry in entries],
                [entry[2] for entry in entries],
                self._counts,
                [self._guides.get(row) for row in rows],
                self.device,
            ),
        )


def target_distributions(
    draft: Draft, plan: TreePlan, logits: Tensor, sampling: Sampling, root_positions: Tensor, *, whole: bool = False
) -> TokenDistributions:
    """The target's distribution at every node, each on its own root path. logits: [M, V]. On the CPU edits are made
    in place; on a device they lie over the logits, which operators fold in on load (`TokenDistributions.overlay`); a
    drafter that looks at the target's logits sees them without edits then, which costs acceptance at most.

    Row i of the result is the distribution of the token after node i. On the CPU its statistics are found when they
    are first looked at, or all at once if `whole`, for whoever wants the target's choice at every node.
    root_positions: int32 [B] absolute.

    A node below a token that a grammar refuses keeps a distribution without the grammar's mask: it has weight 0 in
    its parent's distribution, so no rule gets there. A node that can be reached and has no token left has a
    distribution of NaN (`failures` says why).
    """
    overlay = None
    if sampling.edits is not None:
        paths = NodePaths(draft.tokens, draft.parents, draft.offsets, root_positions)
        if folds(logits):
            overlay = sampling.edits.over(logits, paths, draft.row_of)
        else:
            logits = sampling.edits.apply(logits, paths, draft.row_of)
    each = sampling.per_node(draft.counts, draft.row_of)
    # on a device all rows are found side by side: one launch, and nothing to wait for
    return each.dists(logits, overlay) if whole or overlay is not None or not logits.is_cpu else each.pending(logits)


def folds(logits: Tensor) -> bool:
    """Whether operators read logits through an overlay of edits: on a device, where a copy in float32 would cost more
    than what is read, and in the formats that kernels there take."""
    return not logits.is_cpu and logits.dtype != torch.float64


def chain_distributions(
    logits: Tensor, sampling: Sampling, root_positions: Tensor, chains: Sequence[Sequence[int]]
) -> TokenDistributions:
    """The distribution of a draft's next token after each of B chains, with the edits that the target's distribution
    will have there.

    logits: [B, V], edited in place, V at most the target's; chains: per row the root and what was drafted after it. A
    row whose edits leave the draft nothing keeps its own distribution: any q will do, what the target refuses is
    never accepted.
    """
    edits = sampling.edits
    if edits is None:
        return sampling.dists(logits)
    shape = chain_layout(tuple(range(len(chains))), tuple(map(len, chains)), logits.device)
    tokens = host_to_device([token for chain in chains for token in chain], torch.int64, logits.device)
    paths = NodePaths(tokens, shape.parents, shape.offsets, root_positions, shape.offsets[1:] - 1)
    edited = edits.apply(logits.clone(), paths, torch.arange(len(chains), device=logits.device))
    dists = sampling.dists(edited)
    empty = torch.isnan(dists.lse)
    if bool(empty.any()):
        dists = sampling.dists(torch.where(empty[:, None], logits.to(edited.dtype), edited))
    return dists


def failures(path: Tensor, dists: TokenDistributions, sampling: Sampling) -> dict[int, tuple[int, str]]:
    """Rows whose path meets a distribution without a token: at which place of the path, and why. Distributions of
    refused nodes decide nothing.

    path: int32 [B, D + 1] accepted nodes, -1 padded. Looks at the distributions only if one of them is broken.
    """
    if not math.isnan(sum(dists.lse.tolist())):
        return {}
    met = (path >= 0) & torch.isnan(dists.lse)[path.long().clamp(min=0)]
    found = {}
    for row in met.any(1).nonzero().flatten().tolist():
        place = int(met[row].int().argmax())
        node = path[row, place : place + 1].long()
        masked = bool((dists.select(node).effective_logits() == float("-inf")).all())
        reason = sampling.edits.why_empty(row) if masked and sampling.edits is not None else None
        found[row] = place, reason or "the model returned NaN or no finite logit"
    return found

"""Several drafters at once: their proposals are joined into one tree per row.

Sampled siblings are tested before deterministic ones, each under the distribution that it was sampled from. A
deterministic token that equals an existing sibling shares its node. A sampled token keeps its own node, because every
sampled token must be verified. With sampled tokens first, sharing nodes loses nothing and is lossless: after an equal
sampled token was rejected, a deterministic token has no probability left.

Every drafter observes the step as if it had drafted alone. A drafter that works from the target's hidden states
observes all accepted tokens, whichever drafter proposed them, since it needs those states. Tests:
tests/drafters/test_forest.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.adaptive.cost_model import CostModel, DraftOutcome
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device, table_to_device
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Acceptance, Budget, Drafter, DrafterParts, Needs, Rng, StateView, TargetOutput

_DEFAULT_DRAFTERS = "ngram,recycling"
_TURN = 16  # tokens between two turns of drafters whose share would be 0
Names = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class _JoinedTree:
    """The tree of one row while drafts are joined. Node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    proposal_kinds: list[int] = field(default_factory=lambda: [0])
    dist_index: list[int] = field(default_factory=lambda: [-1])
    score_only: list[bool] = field(default_factory=lambda: [False])
    nodes_by_token: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node to share


class ForestDrafter:
    """Joins the drafts of several drafters.

    Drafters that sample tokens without their deterministic siblings cannot be joined (`draft_tree` with how="hybrid"):
    siblings from another drafter would change the distribution of these tokens. If several drafters sample, their
    distributions must cover the whole vocabulary.

    Args:
        of: The drafters. By name, `from_parts` accepts "a,b", a list, or {name: options}; its default is ngram and
            recycling.
        num_draft_tokens: Default budget per row, which the drafters share.
        adapt: Split the budget by the accepted tokens expected of each drafter; otherwise evenly.

    Raises:
        ValueError: If there are no drafters, if they cannot be joined, or if an option is out of range.
    """

    name = "forest"
    may_take_draft = draws = True
    needs = Needs(topology="tree", host_tokens=True)

    def __init__(self, of: Sequence[Drafter] = (), num_draft_tokens: int = 16, adapt: bool = True) -> None:
        if not of or any(isinstance(source, str) for source in of):
            raise ValueError(
                f"forest of: got {of!r}; expected drafters; pass names with `-o of=ngram,recycling` or load()"
            )
        if num_draft_tokens < 1:
            raise ValueError(f"forest num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        unfit = next((source.name for source in of if source.needs.excludes_siblings), None)
        if unfit is not None:
            raise ValueError(
                f"forest of: got {unfit} whose tokens are sampled without their deterministic siblings, which other "
                "drafters would add to; expected another way to pick, such as "
                'of={"draft_tree": {"how": "without_replacement"}}'
            )
        sampling = [source for source in of if source.needs.dists]
        partial = next((source.name for source in sampling if source.needs.partial_dists), None)
        if partial is not None and len(sampling) > 1:
            raise ValueError(
                f"forest of: got {partial}, which samples from distributions over part of the vocabulary, beside "
                "another drafter that "
                'samples; expected deterministic tokens of all but one drafter, such as of={"eagle3": {"how": "top_k"}}'
            )
        self.sources = list(of)
        self.num_draft_tokens = num_draft_tokens
        self.adapt = adapt
        each = [source.needs for source in of]
        joint = (
            *("host_tokens", "own_cache", "partial_layers", "node_choices", "logits", "dists", "partial_dists"),
            "follows_clock",
        )
        self.needs = Needs(
            topology="tree",
            cross_request=(adapt and len(of) > 1) or any(needs.cross_request for needs in each),
            aux_hidden_states=tuple(
                dict.fromkeys(aux_hidden_state for needs in each for aux_hidden_state in needs.aux_hidden_states)
            ),
            prompt_aux_hidden_states=tuple(
                dict.fromkeys(aux_hidden_state for needs in each for aux_hidden_state in needs.prompt_aux_hidden_states)
            ),
            all_prompt_states=any(
                needs.all_prompt_states for needs in each if needs.aux_hidden_states or needs.prompt_aux_hidden_states
            ),
            vocab_size=max((needs.vocab_size for needs in each if needs.vocab_size is not None), default=None),
            **{name: any(getattr(needs, name) for needs in each) for name in joint},
        )
        self._cost_models = [CostModel() for _ in of]  # acceptance of each drafter, by row and overall
        self._last: Draft | None = None  # the joined draft of the step
        self._drafts: list[tuple[Draft, list[int], list[int]]] = []  # per drafter: draft, its joined nodes, budgets

    def forget(self) -> None:
        """Makes drafters drop the data that they share between requests."""
        for source in self.sources:
            if hasattr(source, "forget"):
                source.forget()

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"of": _DEFAULT_DRAFTERS}

    @classmethod
    def from_parts(cls, parts: DrafterParts, of: Names = _DEFAULT_DRAFTERS, **options: Any) -> ForestDrafter:
        """Builds the drafters by name: "a,b", a list of names, or {name: options}."""
        named = of.split(",") if isinstance(of, str) else of
        chosen: dict[str, Mapping[str, Any]] = dict(named) if isinstance(named, Mapping) else {n: {} for n in named}
        if cls.name in chosen:
            raise ValueError("forest of: got a forest; expected other drafters")
        made = [parts.make(name, **own) for name, own in chosen.items()]
        for at, (name, own) in enumerate(chosen.items()):
            if made[at].needs.excludes_siblings and not own:
                made[at] = parts.make(name, **getattr(made[at], "apart", {}))
        return cls(made, **options)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds the rows to all drafters."""
        for source in self.sources:
            source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Joins the trees of all drafters, which share each row's budget."""
        shares = [self._share_budget(row, limit, view.length(row)) for row, limit in zip(rows, budget.nodes)]
        trees = [_JoinedTree([view.tokens(row)[-1]]) for row in rows]
        drafts = [  # each with its own draw numbers: two draws of one number would read the same noise
            source.propose(
                view,
                rows,
                Budget([share[at] for share in shares]),
                replace(rng, first_draw=rng.first_draw + (at << 16)),
            )
            or Draft.chains(rows, [[view.tokens(row)[-1]] for row in rows], device=view.device)
            for at, source in enumerate(self.sources)
        ]
        dists, first = _concat_draft_distributions([draft.dists for draft in drafts])
        placed: list[list[int]] = [[] for _ in drafts]
        # sampled drafts first: others share their nodes
        for at in sorted(range(len(drafts)), key=lambda one: drafts[one].dists is None):
            placed[at] = _add_draft(trees, drafts[at], first[at])
        order = [_order_siblings(tree) for tree in trees]
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + len(tree.tokens))
        self._drafts = []
        for at, (draft, nodes) in enumerate(zip(drafts, placed)):
            joined = [starts[row] + order[row][node] for row, node in zip(draft.row_of.tolist(), nodes)]
            self._drafts.append((draft, joined, [share[at] for share in shares]))
        self._last = _pack_trees(rows, trees, order, dists, view.device)
        return self._last

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Lets every drafter observe the step, as far as it concerns its own draft."""
        if draft is not self._last:  # another drafter's step
            for source in self.sources:
                source.observe(view, draft, acceptance, output)
            return
        rows = draft.host_rows()
        paths = [path[: count + 1] for path, count in zip(acceptance.path.tolist(), acceptance.read_num_accepted())]
        tokens, next_tokens = draft.tokens.tolist(), acceptance.next_token.tolist()
        for source, cost_model, (own, nodes, budgets) in zip(self.sources, self._cost_models, self._drafts):
            own_acceptance, outcomes = _restrict_acceptance(own, nodes, paths, tokens, next_tokens, acceptance)
            cost_model.observe(rows, budgets, outcomes)
            if source.needs.aux_hidden_states:
                source.observe(view, draft, acceptance, output)
                continue
            at = host_to_device(nodes, torch.int64, draft.tokens.device)
            logits = None if output.logits is None else output.logits[at]
            source.observe(
                view,
                own,
                own_acceptance,
                TargetOutput(
                    logits, {n: aux_hidden_state[at] for n, aux_hidden_state in output.aux_hidden_states.items()}
                ),
            )
        self._last, self._drafts = None, []

    def release(self, rows: Sequence[int]) -> None:
        """Releases the rows in all drafters, even if one of them raises."""
        with ExitStack() as leaving:  # all of them, even if one raises
            for source, cost_model in zip(self.sources, self._cost_models):
                leaving.callback(source.release, rows)
                leaving.callback(cost_model.release, rows)

    def _share_budget(self, row: int, limit: int, length: int) -> list[int]:
        """Splits a row's budget: one node each, and every further node to the largest expected gain."""
        # The drafters with the largest gains come first. If there are fewer nodes than drafters, the others take turns
        # every `_TURN` tokens of the row, since a drafter that never drafts shows no acceptance.
        count = len(self.sources)
        if not self.adapt:
            return [limit // count + (at < limit % count) for at in range(count)]
        shares = [0] * count
        if limit == 0:
            return shares
        gains = [[*model.node_gains(row, limit), 0.0] for model in self._cost_models]
        order = sorted(range(count), key=lambda at: -gains[at][0])
        if length % _TURN == 0:
            order.sort(key=lambda at: at != length // _TURN % count)
        for at in order[:limit]:
            shares[at] = 1
        for _ in range(limit - sum(shares)):
            shares[max(range(count), key=lambda at: gains[at][shares[at]])] += 1
        return shares


def _add_draft(trees: list[_JoinedTree], draft: Draft, first: int) -> list[int]:
    """Adds a draft's nodes to the trees; returns their nodes there. first: row of its first distribution."""
    tokens, parents, proposal_kinds = draft.tokens.tolist(), draft.parents.tolist(), draft.proposal_kinds.tolist()
    dist_index, offsets = draft.dist_index.tolist(), draft.offsets.tolist()
    score_only = [False] * len(tokens) if draft.score_only is None else draft.score_only.tolist()
    placed: list[int] = []
    for row, tree in enumerate(trees):
        start = offsets[row]
        placed.append(0)
        for node in range(start + 1, offsets[row + 1]):
            parent = placed[start + parents[node]]
            key = (parent, tokens[node])
            shares = proposal_kinds[node] == ProposalKind.DETERMINISTIC and not score_only[node]
            if shares and key in tree.nodes_by_token:
                placed.append(tree.nodes_by_token[key])
                continue
            placed.append(len(tree.tokens))
            if not score_only[node]:
                tree.nodes_by_token.setdefault(key, len(tree.tokens))
            tree.tokens.append(tokens[node])
            tree.parents.append(parent)
            tree.proposal_kinds.append(proposal_kinds[node])
            tree.dist_index.append(
                first + dist_index[node] if proposal_kinds[node] != ProposalKind.DETERMINISTIC else -1
            )
            tree.score_only.append(score_only[node])
    return placed


def _order_siblings(tree: _JoinedTree) -> list[int]:
    """New place of each node: sampled siblings before deterministic ones, parents before children."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    order, place = [0], [0] * len(tree.tokens)
    for node in order:  # grows while it is read: breadth-first
        for child in sorted(children[node], key=lambda one: tree.proposal_kinds[one] == ProposalKind.DETERMINISTIC):
            place[child] = len(order)
            order.append(child)
    return place


def _concat_draft_distributions(
    parts: Sequence[TokenDistributions | None],
) -> tuple[TokenDistributions | None, list[int]]:
    """Concatenates distributions over one vocabulary; returns them and the first row of each drafter."""
    first, used = [], 0
    for part in parts:
        first.append(used)
        used += 0 if part is None else part.inv_t.shape[0]
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return (present[0] if present else None), first
    if any(part.token_ids is not None for part in present):
        raise ValueError(
            "forest: got distributions over part of a vocabulary from several drafters; expected one such drafter"
        )
    widest = max(part.logits.shape[1] for part in present)
    same = [
        part
        if part.logits.shape[1] == widest
        else replace(part, logits=pad(part.logits, (0, widest - part.logits.shape[1]), value=-torch.inf), mass=None)
        for part in present
    ]
    return concat_distributions(same), first


def _pack_trees(
    rows: Sequence[int],
    trees: list[_JoinedTree],
    order: list[list[int]],
    dists: TokenDistributions | None,
    device: torch.device,
) -> Draft:
    """Packs the joined trees, each in its order, into one draft."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "parents", "proposal_kinds", "dist_index", "score_only")
    }
    deepest = 0
    for tree, place in zip(trees, order):
        back = sorted(range(len(place)), key=place.__getitem__)
        depth = [0] * len(place)
        for at, node in enumerate(back):
            parent = tree.parents[node]
            columns["parents"].append(-1 if parent < 0 else place[parent])
            depth[at] = 0 if parent < 0 else depth[place[parent]] + 1
            for name in ("tokens", "proposal_kinds", "dist_index", "score_only"):
                columns[name].append(getattr(tree, name)[node])
        deepest = max(deepest, max(depth))
    shape = chain_layout(tuple(rows), tuple(len(tree.tokens) for tree in trees), device)

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        return host_to_device(columns[name], dtype, device)

    return Draft(
        rows=shape.rows,
        tokens=tensor("tokens", torch.int64),
        parents=tensor("parents", torch.int32),
        offsets=shape.offsets,
        proposal_kinds=tensor("proposal_kinds", torch.int8),
        dist_index=tensor("dist_index", torch.int32),
        row_of=shape.row_of,
        counts=tuple(len(tree.tokens) for tree in trees),
        max_depth=deepest,
        dists=dists if any(columns["proposal_kinds"]) else None,
        score_only=tensor("score_only", torch.bool) if any(columns["score_only"]) else None,
    )


def _restrict_acceptance(
    own: Draft,
    nodes: list[int],
    paths: list[list[int]],
    tokens: list[int],
    next_tokens: list[int],
    acceptance: Acceptance,
) -> tuple[Acceptance, list[DraftOutcome]]:
    """The step from the view of one drafter: the part of the accepted path that it drafted too, and its outcome."""
    offsets, parents = own.offsets.tolist(), own.parents.tolist()
    acceptable = [True] * own.num_nodes if own.score_only is None else (~own.score_only).tolist()
    own_paths, own_next, outcomes = [], [], []
    for row, path in enumerate(paths):
        start, stop = offsets[row], offsets[row + 1]
        path_here = [start]
        for reached in path[1:]:
            here = path_here[-1] - start
            step = next((n for n in range(start, stop) if parents[n] == here and nodes[n] == reached), None)
            if step is None:
                break
            path_here.append(step)
        own_paths.append(path_here)
        accepted = len(path_here) - 1
        own_next.append(tokens[path[accepted + 1]] if accepted + 1 < len(path) else next_tokens[row])
        drafted = [n for n in range(start + 1, stop) if acceptable[n]]
        own_path = [drafted.index(node) + 1 for node in path_here[1:]]
        outcomes.append(DraftOutcome(len(drafted), accepted, stop - start - 1, own_path))
    width = own.max_depth + 1
    device = acceptance.path.device
    padded = [own_path + [-1] * (width - len(own_path)) for own_path in own_paths]
    choice = acceptance.node_choice
    own_acceptance = Acceptance(
        path=table_to_device(padded, torch.int32, device),
        num_accepted=host_to_device([len(own_path) - 1 for own_path in own_paths], torch.int32, device),
        next_token=host_to_device(own_next, torch.int64, device),
        node_choice=None if choice is None else choice[host_to_device(nodes, torch.int64, device)],
    )
    return own_acceptance, outcomes


DRAFTER = ForestDrafter

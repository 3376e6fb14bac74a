"""Several drafters at once (`of`, without it ngram and recycling): their proposals joined into one tree per row.

Siblings are tested drawn ones first, each under the distribution that it was drawn from. A chosen token that is there
already becomes the same node; a drawn one stays beside its equal, for each was drawn and has to be verified. With
drawn tokens in front this folding loses nothing and is lossless: a chosen token behind an equal one that was drawn
and refused has no mass left. Every drafter hears of the step as if it had been alone; one that works from hidden
states of the target hears of all that was accepted, whoever drafted it, since it needs those states. Tests:
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

from specdec_fast.adaptive.cost_model import CostModel, Outcome
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device, table_to_device
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Acceptance, Budget, Drafter, DrafterParts, Needs, Rng, StateView, TargetOutput

_USUAL = "ngram,recycling"
_TURN = 16  # tokens between two turns of drafters that would not be asked
Names = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class _Joined:
    """One row's tree while drafts are joined; node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    proposal_kinds: list[int] = field(default_factory=lambda: [0])
    dist_index: list[int] = field(default_factory=lambda: [-1])
    score_only: list[bool] = field(default_factory=lambda: [False])
    chosen: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node to fold into


class ForestDrafter:
    """Joins the drafts of the drafters `of`; by name they are made with their own defaults, or {name: options}.

    of: by name, without it ngram and recycling; num_draft_tokens: the default budget per row, which they share; adapt:
    share it by the tokens that each is expected to bring, from its acceptance so far; otherwise evenly.

    Drafters whose drawn tokens exclude chosen siblings (`draft_tree` with how=hybrid) cannot be joined with others: a
    sibling from elsewhere would change the distribution that their tokens were drawn from. Drafters that draw have
    their distributions stacked, so one whose distributions are over part of the vocabulary is the only one that draws.
    """

    name = "forest"
    may_take_draft = draws = True
    needs = Needs(topology="tree", host_tokens=True)

    def __init__(self, of: Sequence[Drafter] = (), num_draft_tokens: int = 16, adapt: bool = True) -> None:
        if not of or any(isinstance(source, str) for source in of):
            raise ValueError(
                f"forest of: got {of!r}; expected drafters; by name with `-o of=ngram,recycling` or load()"
            )
        if num_draft_tokens < 1:
            raise ValueError(f"forest num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        unfit = next((source.name for source in of if source.needs.excludes_siblings), None)
        if unfit is not None:
            raise ValueError(
                f"forest of: got {unfit} with tokens that are drawn outside their chosen siblings, which others would "
                'join; expected other ways to pick, such as of={"draft_tree": {"how": "without_replacement"}}'
            )
        drawing = [source for source in of if source.needs.dists]
        partial = next((source.name for source in drawing if source.needs.partial_dists), None)
        if partial is not None and len(drawing) > 1:
            raise ValueError(
                f"forest of: got {partial}, which draws from distributions over part of the vocabulary, beside "
                f"another that "
                'draws; expected all but one to choose their tokens, such as of={"eagle3": {"how": "top_k"}}'
            )
        self.sources = list(of)
        self.num_draft_tokens = num_draft_tokens
        self.adapt = adapt
        each = [source.needs for source in of]
        joint = "host_tokens", "own_cache", "partial_layers", "node_choices", "logits", "dists", "partial_dists"
        self.needs = Needs(
            topology="tree",
            cross_request=(adapt and len(of) > 1) or any(needs.cross_request for needs in each),
            aux_hidden_states=tuple(
                dict.fromkeys(aux_hidden_state for needs in each for aux_hidden_state in needs.aux_hidden_states)
            ),
            prompt_aux_hidden_states=tuple(
                dict.fromkeys(aux_hidden_state for needs in each for aux_hidden_state in needs.prompt_aux_hidden_states)
            ),
            vocab_size=max((needs.vocab_size for needs in each if needs.vocab_size is not None), default=None),
            **{name: any(getattr(needs, name) for needs in each) for name in joint},
        )
        self._records = [CostModel() for _ in of]  # acceptance of each, by row and overall
        self._last: Draft | None = None  # of the step, and of each drafter: its own, with its nodes in the forest
        self._drafts: list[tuple[Draft, list[int], list[int]]] = []  # and with the nodes that it was allowed

    def forget(self) -> None:
        """Drafters that share what they learn between requests forget it."""
        for source in self.sources:
            if hasattr(source, "forget"):
                source.forget()

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"of": _USUAL}

    @classmethod
    def from_parts(cls, parts: DrafterParts, of: Names = _USUAL, **options: Any) -> ForestDrafter:
        """Of drafters by name: "a,b", a list of names, or {name: options}."""
        named = of.split(",") if isinstance(of, str) else of
        chosen: dict[str, Mapping[str, Any]] = dict(named) if isinstance(named, Mapping) else {n: {} for n in named}
        if cls.name in chosen:
            raise ValueError("forest of: got a forest; expected drafters that are none")
        made = [parts.make(name, **own) for name, own in chosen.items()]
        for at, (name, own) in enumerate(chosen.items()):
            if made[at].needs.excludes_siblings and not own:
                made[at] = parts.make(name, **getattr(made[at], "apart", {}))
        return cls(made, **options)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        for source in self.sources:
            source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        shares = [self._shares(row, limit, view.length(row)) for row, limit in zip(rows, budget.nodes)]
        trees = [_Joined([view.tokens(row)[-1]]) for row in rows]
        drafts = [  # each with draws of its own: two draws of one number would come from the same noise
            source.propose(
                view,
                rows,
                Budget([share[at] for share in shares]),
                replace(rng, first_draw=rng.first_draw + (at << 16)),
            )
            for at, source in enumerate(self.sources)
        ]
        dists, first = _stack([draft.dists for draft in drafts])
        placed: list[list[int]] = [[] for _ in drafts]
        for at in sorted(range(len(drafts)), key=lambda one: drafts[one].dists is None):  # into drawn nodes others fold
            placed[at] = _place(trees, drafts[at], first[at])
        order = [_siblings_in_order(tree) for tree in trees]
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + len(tree.tokens))
        self._drafts = []
        for at, (draft, nodes) in enumerate(zip(drafts, placed)):
            joined = [starts[row] + order[row][node] for row, node in zip(draft.row_of.tolist(), nodes)]
            self._drafts.append((draft, joined, [share[at] for share in shares]))
        self._last = _pack(rows, trees, order, dists, view.device)
        return self._last

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        if draft is not self._last:  # a step that was not drafted here
            for source in self.sources:
                source.observe(view, draft, acceptance, output)
            return
        rows = draft.host_rows()
        paths = [path[: count + 1] for path, count in zip(acceptance.path.tolist(), acceptance.read_num_accepted())]
        tokens, following = draft.tokens.tolist(), acceptance.next_token.tolist()
        for source, record, (own, nodes, asked) in zip(self.sources, self._records, self._drafts):
            heard, outcomes = _alone(own, nodes, paths, tokens, following, acceptance)
            record.observe(rows, asked, outcomes)
            if source.needs.aux_hidden_states:
                source.observe(view, draft, acceptance, output)
                continue
            at = host_to_device(nodes, torch.int64, draft.tokens.device)
            logits = None if output.logits is None else output.logits[at]
            source.observe(
                view,
                own,
                heard,
                TargetOutput(
                    logits, {n: aux_hidden_state[at] for n, aux_hidden_state in output.aux_hidden_states.items()}
                ),
            )
        self._last, self._drafts = None, []

    def release(self, rows: Sequence[int]) -> None:
        with ExitStack() as leaving:  # all of them, whatever one raises
            for source, record in zip(self.sources, self._records):
                leaving.callback(source.release, rows)
                leaving.callback(record.release, rows)

    def _shares(self, row: int, limit: int, length: int) -> list[int]:
        """Nodes of each drafter: one for each, of whom most is expected first, then where the next one brings most.

        length: tokens of the row; where not all can have one, one of them has it in turn every so many tokens, for who
        is never asked can show nothing.
        """
        count = len(self.sources)
        if not self.adapt:
            return [limit // count + (at < limit % count) for at in range(count)]
        shares = [0] * count
        if limit == 0:
            return shares
        gains = [[record.answered(row) * gain for gain in record.expected(row, limit)] for record in self._records]
        order = sorted(range(count), key=lambda at: gains[at][0] - gains[at][1])
        if length % _TURN == 0:
            order.sort(key=lambda at: at != length // _TURN % count)
        for at in order[:limit]:
            shares[at] = 1
        for _ in range(limit - sum(shares)):
            best = max(range(count), key=lambda at: gains[at][min(shares[at] + 1, limit)] - gains[at][shares[at]])
            shares[best] += 1
        return shares


def _place(trees: list[_Joined], draft: Draft, first: int) -> list[int]:
    """Enter a draft's nodes; the node of its row's tree that each became. first: its first distribution row."""
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
            folds = proposal_kinds[node] == ProposalKind.DETERMINISTIC and not score_only[node]
            if folds and key in tree.chosen:
                placed.append(tree.chosen[key])
                continue
            placed.append(len(tree.tokens))
            if not score_only[node]:
                tree.chosen.setdefault(key, len(tree.tokens))
            tree.tokens.append(tokens[node])
            tree.parents.append(parent)
            tree.proposal_kinds.append(proposal_kinds[node])
            tree.dist_index.append(
                first + dist_index[node] if proposal_kinds[node] != ProposalKind.DETERMINISTIC else -1
            )
            tree.score_only.append(score_only[node])
    return placed


def _siblings_in_order(tree: _Joined) -> list[int]:
    """Where each node goes so that drawn siblings come before chosen ones, and parents before children."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    order, place = [0], [0] * len(tree.tokens)
    for node in order:  # grows while it is read: breadth first
        for child in sorted(children[node], key=lambda one: tree.proposal_kinds[one] == ProposalKind.DETERMINISTIC):
            place[child] = len(order)
            order.append(child)
    return place


def _stack(parts: Sequence[TokenDistributions | None]) -> tuple[TokenDistributions | None, list[int]]:
    """All distributions over one vocabulary, and where those of each drafter begin."""
    first, used = [], 0
    for part in parts:
        first.append(used)
        used += 0 if part is None else part.inv_t.shape[0]
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return (there[0] if there else None), first
    if any(part.token_ids is not None for part in there):
        raise ValueError(
            "forest: got distributions over part of a vocabulary from several drafters; expected one such drafter"
        )
    widest = max(part.logits.shape[1] for part in there)
    same = [
        part
        if part.logits.shape[1] == widest
        else replace(part, logits=pad(part.logits, (0, widest - part.logits.shape[1]), value=-torch.inf), mass=None)
        for part in there
    ]
    return concat_distributions(same), first


def _pack(
    rows: Sequence[int],
    trees: list[_Joined],
    order: list[list[int]],
    dists: TokenDistributions | None,
    device: torch.device,
) -> Draft:
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


def _alone(
    own: Draft,
    nodes: list[int],
    paths: list[list[int]],
    tokens: list[int],
    following: list[int],
    acceptance: Acceptance,
) -> tuple[Acceptance, list[Outcome]]:
    """A step as one drafter would have seen it alone: the part of the accepted path that it had drafted too."""
    offsets, parents = own.offsets.tolist(), own.parents.tolist()
    may = [True] * own.num_nodes if own.score_only is None else (~own.score_only).tolist()
    mine, following_mine, outcomes = [], [], []
    for row, path in enumerate(paths):
        start, stop = offsets[row], offsets[row + 1]
        walk, depth = [start], [0] * (stop - start)
        for node in range(start + 1, stop):
            depth[node - start] = depth[parents[node]] + 1
        for reached in path[1:]:
            here = walk[-1] - start
            step = next((n for n in range(start, stop) if parents[n] == here and nodes[n] == reached), None)
            if step is None:
                break
            walk.append(step)
        mine.append(walk)
        accepted = len(walk) - 1
        following_mine.append(tokens[path[accepted + 1]] if accepted + 1 < len(path) else following[row])
        drafted = [n for n in range(start + 1, stop) if may[n]]
        went_on = any(parents[n] == walk[-1] - start for n in drafted)
        deepest = max((depth[n - start] for n in drafted), default=0)
        outcomes.append(Outcome(len(drafted), deepest, accepted + went_on, accepted, stop - start - 1))
    width = own.max_depth + 1
    device = acceptance.path.device
    padded = [walk + [-1] * (width - len(walk)) for walk in mine]
    choice = acceptance.node_choice
    heard = Acceptance(
        path=table_to_device(padded, torch.int32, device),
        num_accepted=host_to_device([len(walk) - 1 for walk in mine], torch.int32, device),
        next_token=host_to_device(following_mine, torch.int64, device),
        node_choice=None if choice is None else choice[host_to_device(nodes, torch.int64, device)],
    )
    return heard, outcomes


DRAFTER = ForestDrafter

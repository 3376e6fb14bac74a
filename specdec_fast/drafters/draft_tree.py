"""A small model drafts a tree, level by level, over a paged cache of its own (SpecInfer, Sequoia, EAGLE-like trees).

Every node of a level gets as many children as `widths` says for it, fewer where the budget ends; that is settled before
a token of the level is drawn, and what was drawn is always handed over. How siblings are picked: `coupled` (the largest
under the replay noise that the target will use: Gumbel top-k, Kool et al. 2019), `hybrid` (the likeliest chosen, one
more drawn outside of them and tested first: Hu et al. 2025), `without_replacement` (Jeon et al. 2024), `iid` (Miao et
al. 2024) or `top_k`. At temperature 0 all of them take the likeliest. Tests: tests/drafters/test_draft_tree.py and the
contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec_fast.draft import Draft, Drawn, Laws, concat_laws, packed_shape
from specdec_fast.interfaces import Acceptance, Budget, Needs, Parts, Rng, StateView, TargetOutput
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_kernels import NodePaths, draw_sample, replay_sample, tree_plan

HOWS = ("coupled", "hybrid", "iid", "top_k", "without_replacement")
PREFERRED = {"drawn": "hybrid", "greedy": "top_k"}
"""What to do for a rule that `prefers` so; its "coupled" means the same here."""


@dataclass(slots=True)
class _Tree:
    """One row's tree while it grows; node 0 is the root."""

    tokens: list[int]
    left: int  # nodes that the budget still allows
    parents: list[int] = field(default_factory=lambda: [-1])
    drawn: list[int] = field(default_factory=lambda: [0])
    law_row: list[int] = field(default_factory=lambda: [-1])
    newest: list[int] = field(default_factory=lambda: [0])  # nodes of the last level
    draws: int = 0  # so far, successful or not: each has a number of its own
    scored: int = 0  # nodes whose keys are staged


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes that get children, in packed order, and what they need."""

    nodes: list[tuple[int, int, int]]  # (index of the tree, node in the tree, number of children)
    laws: Laws
    seeds: Tensor
    roots: Tensor  # positions of the roots
    positions: Tensor  # of the children
    first_draw: Tensor  # number of the first child's draw


class DraftTreeDrafter:
    """Drafts with `model`, a target of its own whose rows mirror those of the engine.

    widths: children of each node by level, (3, 2, 1): three, two for each of them, one for each of those;
    num_draft_tokens: the default budget per row (default: all that the widths allow), spent level by level; how: one of
    `HOWS`, or a rule's `prefers`; vocab_size: the target's (draft ids beyond it are masked).

    A pass per level runs over the tree so far, because tree attention takes whole trees; the keys and values of what is
    accepted move to the front and stay.
    """

    name = "draft_tree"
    takes_draft = True

    def __init__(
        self,
        model: HuggingFaceTarget,
        widths: Sequence[int] = (3, 2, 1),
        num_draft_tokens: int | None = None,
        how: str = "coupled",
        vocab_size: int | None = None,
    ) -> None:
        how = PREFERRED.get(how, how)
        if not widths or any(width < 1 for width in widths):
            raise ValueError(f"draft_tree widths: got {tuple(widths)}; expected one number of at least 1 per level")
        if how not in HOWS:
            raise ValueError(f"draft_tree how: got {how!r}; expected one of {', '.join(HOWS)}")
        self._most = sum(accumulate(widths, lambda nodes, width: nodes * width))
        if num_draft_tokens is not None and num_draft_tokens < 1:
            raise ValueError(f"draft_tree num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        self.model = model
        self.widths = tuple(widths)
        self.num_draft_tokens = min(self._most, num_draft_tokens or self._most)
        self.how = how
        self.needs = Needs(topology="tree", own_cache=True, laws=how in ("hybrid", "iid", "without_replacement"))
        self._vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self._stored: dict[int, tuple[int, _Tree | None]] = {}  # per row: committed tokens held, the tree staged behind

    @classmethod
    def from_parts(cls, parts: Parts, **options: Any) -> DraftTreeDrafter:
        """Over the draft model that was given, picking tokens as the rule prefers."""
        assert parts.draft is not None
        model: Any = parts.draft()
        return cls(model, **{"how": parts.prefers, "vocab_size": parts.target.vocab_size, **options})

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        room = self.model.cache.max_rows
        if max(rows) >= room:
            raise ValueError(
                f"draft_tree: got row {max(rows)} of the engine and a draft with room for {room} rows; expected at "
                "least as many as the target has; build the draft with the target's max_rows"
            )
        for row in rows:
            self._stored[row] = (0, None)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        texts = [view.tokens(row) for row in rows]
        limits = [min(limit, self._most) for limit in budget.nodes]
        trees = [
            _Tree([text[-1]], limit if limit > 0 and self._room(row, len(text) + limit) else 0)
            for row, limit, text in zip(rows, limits, texts)
        ]
        active = [index for index, tree in enumerate(trees) if tree.left]
        parts: list[Laws] = []
        if active:
            self._catch_up([rows[index] for index in active], [texts[index] for index in active])
        for width in self.widths:
            wanted = _settle(trees, width)
            if not wanted:
                break
            level = self._score(view, rows, trees, wanted, rng, depth=len(parts))
            self._grow(trees, level, used=sum(part.inv_t.shape[0] for part in parts))
            parts.append(level.laws)
        for index in active:
            self._stored[rows[index]] = (self._stored[rows[index]][0], trees[index])
        return self._pack(view, rows, trees, parts)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass  # the next propose compares what it staged with what was committed

    def release(self, rows: Sequence[int]) -> None:
        self.model.cache.release([row for row in rows if self._stored.pop(row, None) is not None])

    def _room(self, row: int, length: int) -> bool:
        cache = self.model.cache
        return length <= self.model.max_length and cache.reserve(row, length)

    def _known(self, token: int) -> int:
        """The target's padding ids may lie beyond the draft's embedding: what stands in for them costs acceptance."""
        return token if token < self.model.vocab_size else 0

    def _catch_up(self, rows: list[int], texts: list[Sequence[int]]) -> None:
        """Keep what was accepted of the trees that are staged, forget the rest, feed what is new but the root."""
        device, cache = self.model.device, self.model.cache
        kept: list[tuple[int, int, list[int]]] = []  # row, nodes staged, accepted path
        for row, text in zip(rows, texts):
            held, tree = self._stored[row]
            path = [] if tree is None else _walk(tree, text[held : len(text) - 1])
            if path:
                assert tree is not None
                kept.append((row, tree.scored, path))
            self._stored[row] = (held + len(path), None)
        if kept:
            shape = packed_shape(tuple(row for row, *_ in kept), tuple(staged for _, staged, _ in kept), device)
            slots = cache.stage(shape.rows, shape.offsets, sum(staged for _, staged, _ in kept))
            starts = accumulate((staged for _, staged, _ in kept), initial=0)
            width = max(len(path) for *_, path in kept)
            paths = [
                [start + node for node in path] + [-1] * (width - len(path)) for start, (*_, path) in zip(starts, kept)
            ]
            accepted = torch.tensor([len(path) - 1 for *_, path in kept], dtype=torch.int32).to(device)
            cache.commit(shape.rows, slots, torch.tensor(paths, dtype=torch.int32).to(device), accepted)
        new = [(row, text[self._stored[row][0] : -1]) for row, text in zip(rows, texts)]
        new = [(row, part) for row, part in new if part]
        if new:
            shape = packed_shape(tuple(row for row, _ in new), tuple(len(part) for _, part in new), device)
            fed = torch.tensor([self._known(token) for _, part in new for token in part], dtype=torch.int64)
            self.model.extend(shape.rows, fed.to(device), shape.offsets, logits=False)
            for row, part in new:
                self._stored[row] = (self._stored[row][0] + len(part), None)

    def _score(
        self,
        view: StateView,
        rows: Sequence[int],
        trees: list[_Tree],
        wanted: list[tuple[int, int, int]],
        rng: Rng,
        depth: int,
    ) -> _Level:
        """One pass over the trees that grow, and the draft's laws after the nodes that get children."""
        device = self.model.device
        growing = sorted({index for index, *_ in wanted})
        place = {index: at for at, index in enumerate(growing)}
        for index in growing:
            trees[index].scored = len(trees[index].tokens)
        draft = Draft.trees(
            [rows[index] for index in growing],
            [([self._known(token) for token in trees[index].tokens], trees[index].parents) for index in growing],
            device=device,
        )
        output, _ = self.model.score(draft, tree_plan(draft.parents, draft.offsets))
        assert output.logits is not None
        starts = list(accumulate(draft.counts, initial=0))
        nodes = torch.tensor([starts[place[index]] + node for index, node, _ in wanted], dtype=torch.int64).to(device)
        logits = output.logits[nodes, : self._vocab_size]
        row_of = torch.tensor([place[index] for index, *_ in wanted], dtype=torch.int64).to(device)
        counts = tuple(sum(1 for index, *_ in wanted if index == one) for one in growing)
        roots = rng.positions if len(growing) == len(rows) else rng.positions[growing]
        sampling = view.sampling([rows[index] for index in growing])
        if sampling.edits is not None:  # q with the target's edits, each node after its own path
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, nodes.to(torch.int32))
            logits = sampling.edits.apply(logits, paths, row_of)
        each = sampling.per_node(counts, row_of)
        first = []
        for index, _, children in wanted:
            first.append(trees[index].draws)
            trees[index].draws += children
        return _Level(
            wanted,
            each.laws(logits),
            each.seeds,
            roots[row_of],
            roots[row_of] + (depth + 1),
            torch.tensor(first, dtype=torch.int32).to(device),
        )

    def _grow(self, trees: list[_Tree], level: _Level, used: int) -> None:
        """Pick the children of a level. used: law rows of the levels before."""
        for tree in trees:
            tree.newest = []
        for at, (children, (index, parent, _)) in enumerate(zip(self._pick(level), level.nodes)):
            tree = trees[index]
            for token, mark in children:
                tree.newest.append(len(tree.tokens))
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.drawn.append(int(mark))
                tree.law_row.append(used + at if mark != Drawn.CHOSEN else -1)

    def _pick(self, level: _Level) -> list[list[tuple[int, Drawn]]]:
        """Tokens and marks of every node's children, in the order in which they are to be tested."""
        laws, how = level.laws, self.how
        counts = torch.tensor([children for *_, children in level.nodes], device=laws.inv_t.device)
        greedy = laws.inv_t == 0
        widest = int(counts.max())
        logits = laws.logits.clone() if widest > 1 or how == "hybrid" else laws.logits
        found: list[list[tuple[int, Drawn]]] = [[] for _ in level.nodes]

        def take(by: str, wanted: Tensor, number: int, mark: Drawn, first: bool = False) -> None:
            """One more child of the nodes that want one and have a token left, by one of three ways of picking."""
            tokens = logits.argmax(1)
            if by == "noise":
                best = replay_sample(logits, laws.inv_t, laws.cut, laws.tie_id, level.seeds, level.positions)
                tokens = torch.where(greedy, tokens, best)
            elif by == "draw":
                index = level.first_draw + number
                mass = laws.mass if logits is laws.logits else None
                best = draw_sample(logits, *laws.stats, level.seeds, level.roots, index, mass=mass)
                tokens = torch.where(greedy, tokens, best)
            here = logits.gather(1, tokens[:, None]).squeeze(1).to(laws.cut.dtype)
            kept = (here > laws.cut) | ((here == laws.cut) & (tokens <= laws.tie_id)) | greedy
            wanted = wanted & kept & (here > float("-inf")) & ~torch.isnan(laws.lse)
            for at in wanted.nonzero().flatten().tolist():
                child = (int(tokens[at]), Drawn.CHOSEN if bool(greedy[at]) else mark)
                found[at].insert(0 if first else len(found[at]), child)
            if logits is not laws.logits:
                gone = wanted & (greedy | (mark != Drawn.DRAWN))
                logits[gone.nonzero().flatten(), tokens[gone]] = float("-inf")

        if how == "hybrid":
            for number in range(1, widest):
                take("top", counts > number, number, Drawn.CHOSEN)
            take("draw", counts > 0, 0, Drawn.DRAWN_WITHOUT_CHOSEN, first=True)
            return found
        by = {"coupled": "noise", "top_k": "top"}.get(how, "draw")
        mark = {"iid": Drawn.DRAWN, "without_replacement": Drawn.DRAWN_WITHOUT_EARLIER}.get(how, Drawn.CHOSEN)
        for number in range(widest):
            take(by, counts > number, number, mark)
        return found

    def _pack(self, view: StateView, rows: Sequence[int], trees: list[_Tree], parts: list[Laws]) -> Draft:
        device = view.device
        counts = tuple(len(tree.tokens) for tree in trees)
        shape = packed_shape(tuple(rows), counts, device)
        drawn = any(any(tree.drawn) for tree in trees)

        def packed(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value for tree in trees for value in getattr(tree, name)], dtype=dtype).to(device)

        return Draft(
            rows=shape.rows,
            tokens=packed("tokens", torch.int64),
            parents=packed("parents", torch.int32),
            offsets=shape.offsets,
            drawn=packed("drawn", torch.int8),
            law_row=packed("law_row", torch.int32),
            row_of=shape.row_of,
            counts=counts,
            max_depth=len(parts),
            laws=concat_laws(parts) if drawn else None,
        )


def _settle(trees: list[_Tree], width: int) -> list[tuple[int, int, int]]:
    """How many children each node of the last level gets: looks at the budget and at nothing that was drawn."""
    wanted = []
    for index, tree in enumerate(trees):
        for node in tree.newest:
            children = min(width, tree.left)
            tree.left -= children
            if children:
                wanted.append((index, node, children))
    return wanted


def _walk(tree: _Tree, text: Sequence[int]) -> list[int]:
    """The staged nodes that hold this text, from the root on: as far as the tree has it."""
    path: list[int] = []
    for token in text:
        parent = path[-1] if path else -1
        following = (n for n in range(tree.scored) if tree.parents[n] == parent and tree.tokens[n] == token)
        node = next(following, None)
        if node is None:
            break
        path.append(node)
    return path


DRAFTER = DraftTreeDrafter

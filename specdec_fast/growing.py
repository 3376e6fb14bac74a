"""Trees that grow level by level by a source's logits: static shapes, and dynamic ones that keep the best (EAGLE-2).

What drafters with a draft model and drafters with a trained head have in common; the source stages, scores and rolls
back. Static trees have a shape that is settled before a token is drawn, and what was drawn is always handed over. How
siblings are picked: `coupled` (the largest under the replay noise that the target will use: Gumbel top-k, Kool et al.
2019), `hybrid` (the likeliest chosen, one more drawn outside of them and tested first: Hu et al. 2025),
`without_replacement` (Jeon et al. 2024), `iid` (Miao et al. 2024) or `top_k`. At temperature 0 all of them take the
likeliest.

Dynamic trees (`depth` above 0; Li et al. 2024, EAGLE-2, section 4) grow from the most promising nodes and keep the best
of all that were seen. That drops tokens by what they are, so theirs are chosen ones: `coupled` or `top_k`.
Tests: tests/drafters/test_draft_tree.py, test_eagle.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush, heappushpop

import torch
from torch import Tensor

from specdec_fast.draft import Draft, Drawn, packed_shape
from specdec_fast.draft_source import Source, Staged
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_fast.laws import Laws, concat_laws
from specdec_fast.sampling import Sampling
from specdec_fast.shapes import Shape
from specdec_kernels import NodePaths, draw_sample, tree_expand

HOWS = ("coupled", "hybrid", "iid", "top_k", "without_replacement")
CHOOSING = ("coupled", "top_k")


@dataclass(slots=True)
class _Tree:
    """One row's tree while it grows; node 0 is the root."""

    tokens: list[int]
    limit: int  # nodes that the budget allows
    parents: list[int] = field(default_factory=lambda: [-1])
    drawn: list[int] = field(default_factory=lambda: [0])
    law_row: list[int] = field(default_factory=lambda: [-1])
    newest: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # last level: place in the shape, node
    draws: int = 0  # so far, successful or not: each has a number of its own


@dataclass(slots=True)
class _Border:
    """One row's dynamic tree while it grows: what was found, and the nodes to go on from."""

    staged: _Tree  # nodes that were or will be scored, a part of what was found
    found: list[tuple[float, int, int]] = field(default_factory=list)  # score, token, parent among these (-1: root)
    open: list[tuple[int, int, float]] = field(
        default_factory=lambda: [(-1, 0, 0.0)]
    )  # place there, staged node, score
    best: list[float] = field(default_factory=list)  # heap of the scores that make the tree so far


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes that get children, in packed order, and what they need."""

    nodes: list[tuple[int, int, int]]  # (index of the tree, node in the tree, number of children)
    logits: Tensor
    columns: Tensor | None  # int64 [columns of the logits] their target ids, None where these are the same
    sampling: Sampling  # per node
    filtered: bool  # some row has top-k, top-p or min-p
    roots: Tensor  # positions of the roots
    positions: Tensor  # of the children


class TreeDrafter:
    """Drafts trees that grow by the logits of `source`.

    shape: of a static tree; depth: above 0, levels of a dynamic tree in its place, `width` nodes of each grown, `width`
    children looked at of each, scored as if the source's law were raised to the power `sharpness`; num_draft_tokens:
    the default budget per row (default: all of a static tree, 24 of a dynamic one); how: one of `HOWS`.

    A pass per level runs over the tree so far, because tree attention takes whole trees; the keys and values of what is
    accepted move to the front and stay.
    """

    name = "tree"
    needs = Needs(topology="tree", own_cache=True)

    def __init__(
        self,
        source: Source,
        shape: Shape,
        *,
        depth: int,
        width: int,
        num_draft_tokens: int | None,
        how: str,
        sharpness: float = 1.0,
    ) -> None:
        if how not in HOWS:
            raise ValueError(f"{self.name} how: got {how!r}; expected one of {', '.join(HOWS)}")
        if num_draft_tokens is not None and num_draft_tokens < 1:
            raise ValueError(f"{self.name} num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        if not 0 < sharpness < float("inf"):
            raise ValueError(f"{self.name} sharpness: got {sharpness}; expected a number above 0")
        if depth < 0 or width < 1:
            raise ValueError(f"{self.name} depth, width: got {depth}, {width}; expected depth >= 0 and width >= 1")
        if depth and how not in CHOOSING:
            raise ValueError(
                f"{self.name} depth: got {depth} with how={how}; expected depth=0, or no shape and "
                f"how={' or '.join(CHOOSING)}: a dynamic tree drops tokens that it has looked at"
            )
        self.source, self.shape = source, shape
        self.how, self.depth, self.width, self.sharpness = how, depth, width, sharpness
        self._most = shape.num_nodes if not depth else width + (depth - 1) * width * width
        self.num_draft_tokens = min(self._most, num_draft_tokens or (24 if depth else self._most))
        self.needs = replace(type(self).needs, laws=how not in CHOOSING, excludes=how == "hybrid")

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        self.source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        texts = [view.tokens(row) for row in rows]
        limits = [min(limit, self._most) for limit in budget.nodes]
        trees = [
            _Tree(
                [text[-1]],
                limit if limit > 0 and self._room(row, len(text), limit) else 0,
                draws=rng.first_draw,
            )
            for row, limit, text in zip(rows, limits, texts)
        ]
        active = [index for index, tree in enumerate(trees) if tree.limit]
        if active:
            self.source.catch_up([rows[index] for index in active], [texts[index] for index in active])
        if self.depth:
            return self._pack(view, rows, self._grow_best(view, rows, trees, rng), [])
        parts: list[Laws] = []
        for depth in range(len(self.shape.parents)):
            wanted = [
                (index, node, len(self.shape.children(tree.limit)[place]))
                for index, tree in enumerate(trees)
                for place, node in tree.newest
            ]
            wanted = [each for each in wanted if each[2]]
            if not wanted:
                break
            level = self._score(view, rows, trees, wanted, rng, depth)
            self._grow(trees, level, parts)
        return self._pack(view, rows, trees, parts)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        self.source.observe(view, draft, acceptance, output)

    def release(self, rows: Sequence[int]) -> None:
        self.source.release(rows)

    def _room(self, row: int, tokens: int, limit: int) -> bool:
        """Whether a row of so many tokens can be drafted for: what it may hold while its tree grows has room."""
        return self.source.room(row, tokens, tokens + max(limit, (self.depth - 1) * self.width))

    def _score(
        self,
        view: StateView,
        rows: Sequence[int],
        trees: list[_Tree],
        wanted: list[tuple[int, int, int]],
        rng: Rng,
        depth: int,
    ) -> _Level:
        """One pass over the trees that grow, and the draft's logits after the nodes that get children."""
        device = self.source.device
        growing = sorted({index for index, *_ in wanted})
        place = {index: at for at, index in enumerate(growing)}
        staged = [Staged(list(trees[index].tokens), list(trees[index].parents)) for index in growing]
        draft, scored = self.source.score([rows[index] for index in growing], staged)
        offsets = draft.offsets.tolist()
        nodes = torch.tensor([offsets[place[index]] + node for index, node, _ in wanted], dtype=torch.int64).to(device)
        logits, columns = self.source.logits(scored[nodes]), self.source.token_ids
        if columns is not None and (self.how in CHOOSING or view.sampling(rows).edits is not None):
            # noise and edits go by the ids of the target
            spread = logits.new_full((logits.shape[0], self.source.vocab_size), float("-inf"))
            logits, columns = spread.index_copy_(1, columns, logits), None
        row_of = torch.tensor([place[index] for index, *_ in wanted], dtype=torch.int64).to(device)
        counts = tuple(sum(1 for index, *_ in wanted if index == one) for one in growing)
        roots = rng.positions if len(growing) == len(rows) else rng.positions[growing]
        sampling = view.sampling([rows[index] for index in growing])
        if sampling.edits is not None:  # q with the target's edits, each node after its own path
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, nodes.to(torch.int32))
            logits = sampling.edits.apply(logits, paths, row_of)
        filtered = sampling.any_filter and not sampling.all_greedy
        roots = roots[row_of]
        sampling = sampling.per_node(counts, row_of)
        return _Level(wanted, logits, columns, sampling, filtered, roots, roots + (depth + 1))

    def _expand(
        self, level: _Level, laws: Laws | None, scores: Tensor, offsets: Tensor, width: int, keep: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best children of a level's nodes: by the noise or the law, at temperature 0 by the law at 1."""
        logits, sampling = level.logits, level.sampling
        inv_t, cut, tie = sampling.unfiltered(logits)
        if level.filtered:
            laws = sampling.laws(logits) if laws is None else laws
            greedy = laws.inv_t == 0
            cut, tie = torch.where(greedy, cut, laws.cut), torch.where(greedy, tie, laws.tie_id)
        noise: dict[str, Tensor] = {}
        if self.how == "coupled":
            noise = {"seeds": sampling.seeds, "positions": torch.where(sampling.temperature == 0, -1, level.positions)}
        width = min(width, logits.shape[1])
        found: tuple[Tensor, Tensor, Tensor] = tree_expand(
            logits,
            inv_t,
            cut,
            tie,
            offsets,
            scores.to(inv_t.dtype),
            width=width,
            keep=keep,
            sharpness=self.sharpness,
            **noise,
        )
        return found

    def _grow(self, trees: list[_Tree], level: _Level, parts: list[Laws]) -> None:
        """Pick the children of a level of static trees."""
        used = sum(part.inv_t.shape[0] for part in parts)
        before = {index: {node: place for place, node in trees[index].newest} for index, *_ in level.nodes}
        for tree in trees:
            tree.newest = []
        if self.how in CHOOSING:
            picked = self._choose(level, None, max(children for *_, children in level.nodes))
        else:
            first = []
            for index, _, children in level.nodes:
                first.append(trees[index].draws)
                trees[index].draws += children
            laws = level.sampling.laws(level.logits)
            parts.append(replace(laws, token_ids=level.columns))
            picked = self._draw(level, laws, torch.tensor(first, dtype=torch.int32).to(laws.inv_t.device))
            if level.columns is not None:
                known = level.columns.tolist()
                picked = [[(known[column], mark) for column, mark in own] for own in picked]
        for at, (own, (index, parent, count)) in enumerate(zip(picked, level.nodes)):
            tree = trees[index]
            places = self.shape.children(tree.limit)[before[index][parent]]
            for place, (token, mark) in zip(places, own[:count]):
                tree.newest.append((place, len(tree.tokens)))
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.drawn.append(int(mark))
                tree.law_row.append(used + at if mark != Drawn.CHOSEN else -1)

    def _choose(self, level: _Level, laws: Laws | None, width: int) -> list[list[tuple[int, Drawn]]]:
        """The `width` best children of every node."""
        bounds = torch.tensor([0, len(level.nodes)], dtype=torch.int32).to(level.logits.device)
        nothing = torch.zeros(len(level.nodes), device=level.logits.device)
        tokens, _, _ = self._expand(level, laws, nothing, bounds, width, 1)
        return [[(token, Drawn.CHOSEN) for token in own if token >= 0] for own in tokens.tolist()]

    def _draw(self, level: _Level, laws: Laws, first_draw: Tensor) -> list[list[tuple[int, Drawn]]]:
        """Tokens and marks of every node's children, in the order in which they are to be tested."""
        counts = torch.tensor([children for *_, children in level.nodes], device=laws.inv_t.device)
        greedy, widest = laws.inv_t == 0, int(counts.max())
        found: list[list[tuple[int, Drawn]]] = [[] for _ in level.nodes]
        logits = laws.logits.clone()
        if self.how == "hybrid" or bool(greedy.any()):
            tops = self._choose(level, laws, widest)
            for at, (own, (*_, children)) in enumerate(zip(tops, level.nodes)):
                drawn_too = self.how == "hybrid" and not bool(greedy[at])
                if drawn_too or bool(greedy[at]):
                    found[at] = own[: children - drawn_too]
                    logits[at, [token for token, _ in found[at]]] = float("-inf")
        mark = {"hybrid": Drawn.DRAWN_WITHOUT_CHOSEN, "iid": Drawn.DRAWN}.get(self.how, Drawn.DRAWN_WITHOUT_EARLIER)
        for number in range(1 if self.how == "hybrid" else widest):
            tokens = draw_sample(logits, *laws.stats, level.sampling.seeds, level.roots, first_draw + number)
            here = logits.gather(1, tokens[:, None]).squeeze(1).to(laws.cut.dtype)
            kept = (here > laws.cut) | ((here == laws.cut) & (tokens <= laws.tie_id))
            wanted = kept & (counts > number) & ~greedy & (here > float("-inf")) & ~torch.isnan(laws.lse)
            for at in wanted.nonzero().flatten().tolist():
                found[at].insert(0 if self.how == "hybrid" else len(found[at]), (int(tokens[at]), mark))
            if mark == Drawn.DRAWN_WITHOUT_EARLIER:
                logits[wanted.nonzero().flatten(), tokens[wanted]] = float("-inf")
        return found

    def _grow_best(self, view: StateView, rows: Sequence[int], trees: list[_Tree], rng: Rng) -> list[_Tree]:
        """Dynamic trees: grow from the best nodes of each level, then keep the best of all nodes, root always."""
        borders = {index: _Border(tree) for index, tree in enumerate(trees) if tree.limit}
        most = max((tree.limit for tree in trees), default=0)
        for depth in range(self.depth):
            wanted = [(at, node, self.width) for at, border in borders.items() for _, node, _ in border.open]
            if not wanted:
                break
            level = self._score(view, rows, trees, wanted, rng, depth)
            growing = [index for index, border in borders.items() if border.open]
            scores = torch.tensor([score for at in growing for *_, score in borders[at].open])
            offsets = packed_shape(
                tuple(growing), tuple(len(borders[at].open) for at in growing), self.source.device
            ).offsets
            width = min(self.width, level.logits.shape[1])
            tokens, found, best = self._expand(level, None, scores.to(self.source.device), offsets, width, most)
            self._take(borders, growing, width, tokens.flatten().tolist(), found.flatten().tolist(), best.tolist())
        return [_finish(tree, borders.get(index)) for index, tree in enumerate(trees)]

    def _take(
        self,
        borders: dict[int, _Border],
        growing: list[int],
        width: int,
        tokens: list[int],
        scores: list[float],
        best: list[list[int]],
    ) -> None:
        """Enter the children of a level, best first, as long as they may belong to the tree in the end."""
        start = 0
        for index, order in zip(growing, best):
            border = borders[index]
            limit, parents = border.staged.limit, border.open
            following: list[tuple[int, int]] = []  # place among what was found, staged node of the parent
            for child in order:
                if child < 0 or (len(border.best) == limit and scores[child] <= border.best[0]):
                    break  # all that follow, and all below them, are worse still
                above, node, _ = parents[child // width - start]
                if len(border.best) == limit:
                    heappushpop(border.best, scores[child])
                else:
                    heappush(border.best, scores[child])
                if len(following) < self.width:
                    following.append((len(border.found), node))
                border.found.append((scores[child], tokens[child], above))
            border.open = []
            for place, node in following:
                score, token, _ = border.found[place]
                if len(border.best) < limit or score > border.best[0]:  # something below it may still belong
                    border.open.append((place, len(border.staged.tokens), score))
                    border.staged.tokens.append(token)
                    border.staged.parents.append(node)
            start += len(parents)

    def _pack(self, view: StateView, rows: Sequence[int], trees: list[_Tree], parts: list[Laws]) -> Draft:
        device = view.device
        counts = tuple(len(tree.tokens) for tree in trees)
        shape = packed_shape(tuple(rows), counts, device)
        drawn = bool(parts) and any(any(tree.drawn) for tree in trees)

        def packed(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value for tree in trees for value in getattr(tree, name)], dtype=dtype).to(device)

        return Draft(
            rows=shape.rows,
            tokens=packed("tokens", torch.int64),
            parents=packed("parents", torch.int32),
            offsets=shape.offsets,
            drawn=packed("drawn", torch.int8) if drawn else shape.drawn,
            law_row=packed("law_row", torch.int32) if drawn else shape.law_row,
            row_of=shape.row_of,
            counts=counts,
            max_depth=max(max(_depths(tree.parents)) for tree in trees),
            laws=concat_laws(parts) if drawn else None,
        )


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _finish(tree: _Tree, border: _Border | None) -> _Tree:
    """The best nodes of all that were found; earlier ones first among equals, so that parents are kept."""
    if border is None:
        return tree
    found = border.found
    best = sorted(sorted(range(len(found)), key=lambda at: (-found[at][0], at))[: tree.limit])
    place = {-1: 0, **{at: node + 1 for node, at in enumerate(best)}}
    count = len(best) + 1
    parents = [-1, *(place[found[at][2]] for at in best)]
    return _Tree([tree.tokens[0], *(found[at][1] for at in best)], tree.limit, parents, [0] * count, [-1] * count)

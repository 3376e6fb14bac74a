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
from itertools import accumulate
from math import inf
from operator import gt

import torch
from torch import Tensor

from specdec_fast.draft import Draft, Drawn, PackedShape, from_host, packed_shape
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
    """One row's dynamic tree while it grows: what was found, by columns, and the nodes to go on from."""

    staged: _Tree  # nodes that were or will be scored, a part of what was found
    best: list[float]  # scores that make the tree so far, ascending; -inf where there is room
    scores: list[float] = field(default_factory=list)  # of what was found
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # among what was found, -1: root
    # the nodes to go on from: their places there, the same among the staged nodes, and their scores
    places: list[int] = field(default_factory=lambda: [-1])
    nodes: list[int] = field(default_factory=lambda: [0])
    ahead: list[float] = field(default_factory=lambda: [0.0])


@dataclass(slots=True)
class _Level:
    """Nodes that get children, in packed order, and what they need."""

    shape: PackedShape  # by tree
    logits: Tensor
    columns: Tensor | None  # int64 [columns of the logits] their target ids, None where these are the same
    sampling: Sampling  # per node
    noisy: bool  # children are picked under the replay noise, in some row at least
    filtered: bool  # some row has top-k, top-p or min-p
    roots: Tensor  # positions of the trees' roots
    depth: int

    def positions(self, depth: int) -> Tensor:
        """Per node: of what is so deep in its tree."""
        return (self.roots + depth)[self.shape.row_of]


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
            nodes: dict[int, list[int]] = {}
            for index, node, _ in wanted:
                nodes.setdefault(index, []).append(node)
            self._grow(trees, wanted, self._score(view, rows, trees, nodes, rng, depth), parts)
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
        wanted: dict[int, list[int]],
        rng: Rng,
        depth: int,
    ) -> _Level:
        """One pass over the trees that grow, and the draft's logits after the nodes that get children, `wanted` of each
        of these trees.
        """
        growing, counts = list(wanted), tuple(map(len, wanted.values()))
        staged = [Staged(list(trees[index].tokens), list(trees[index].parents)) for index in growing]
        own = [rows[index] for index in growing]
        scored = self.source.score(own, staged)
        starts = accumulate((len(tree.tokens) for tree in staged), initial=0)
        nodes = [start + node for start, some in zip(starts, wanted.values()) for node in some]
        if nodes[-1] - nodes[0] + 1 == len(nodes):
            scored = scored[nodes[0] : nodes[-1] + 1]
        else:
            scored = scored[from_host(nodes, torch.int64, self.source.device)]
        logits, columns = self.source.logits(scored), self.source.token_ids
        sampling = view.sampling(own)
        if columns is not None and (self.how in CHOOSING or view.sampling(rows).edits is not None):
            # noise and edits go by the ids of the target
            spread = logits.new_full((logits.shape[0], self.source.vocab_size), float("-inf"))
            logits, columns = spread.index_copy_(1, columns, logits), None
        roots = rng.positions if len(growing) == len(rows) else rng.positions[growing]
        shape = packed_shape(tuple(growing), counts, self.source.device)
        if sampling.edits is not None:  # q with the target's edits, each node after its own path
            draft = Draft.trees(growing, [(tree.tokens, tree.parents) for tree in staged], device=logits.device)
            ends = from_host(nodes, torch.int32, logits.device)
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, ends)
            logits = sampling.edits.apply(logits, paths, shape.row_of)
        noisy = self.how == "coupled" and not sampling.all_greedy
        filtered = sampling.any_filter and not sampling.all_greedy
        sampling = sampling.per_node(counts, shape.row_of)
        return _Level(shape, logits, columns, sampling, noisy, filtered, roots, depth)

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
        if level.noisy:
            places = level.positions(level.depth + 1)
            if level.filtered:  # or there is no row at temperature 0
                places = torch.where(sampling.temperature == 0, -1, places)
            noise = {"seeds": sampling.seeds, "positions": places}
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

    def _grow(self, trees: list[_Tree], wanted: list[tuple[int, int, int]], level: _Level, parts: list[Laws]) -> None:
        """Pick the children of a level of static trees. wanted: tree, node in it and number of children."""
        used = sum(part.inv_t.shape[0] for part in parts)
        before = {index: {node: place for place, node in trees[index].newest} for index, *_ in wanted}
        for tree in trees:
            tree.newest = []
        if self.how in CHOOSING:
            picked = self._choose(level, None, max(children for *_, children in wanted))
        else:
            first = []
            for index, _, children in wanted:
                first.append(trees[index].draws)
                trees[index].draws += children
            laws = level.sampling.laws(level.logits)
            parts.append(replace(laws, token_ids=level.columns))
            counts = [children for *_, children in wanted]
            picked = self._draw(level, laws, counts, from_host(first, torch.int32, laws.inv_t.device))
            if level.columns is not None:
                known = level.columns.tolist()
                picked = [[(known[column], mark) for column, mark in own] for own in picked]
        for at, (own, (index, parent, count)) in enumerate(zip(picked, wanted)):
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
        count, device = level.logits.shape[0], level.logits.device
        bounds = packed_shape((0,), (count,), device).offsets
        tokens, _, _ = self._expand(level, laws, torch.zeros(count, device=device), bounds, width, 1)
        return [[(token, Drawn.CHOSEN) for token in own if token >= 0] for own in tokens.tolist()]

    def _draw(
        self, level: _Level, laws: Laws, children: list[int], first_draw: Tensor
    ) -> list[list[tuple[int, Drawn]]]:
        """Tokens and marks of every node's children, so many, in the order in which they are to be tested."""
        counts, widest = from_host(children, torch.int32, laws.inv_t.device), max(children)
        greedy, roots = laws.inv_t == 0, level.positions(0)
        found: list[list[tuple[int, Drawn]]] = [[] for _ in children]
        logits = laws.logits.clone()
        if self.how == "hybrid" or bool(greedy.any()):
            tops = self._choose(level, laws, widest)
            for at, (own, count) in enumerate(zip(tops, children)):
                drawn_too = self.how == "hybrid" and not bool(greedy[at])
                if drawn_too or bool(greedy[at]):
                    found[at] = own[: count - drawn_too]
                    logits[at, [token for token, _ in found[at]]] = float("-inf")
        mark = {"hybrid": Drawn.DRAWN_WITHOUT_CHOSEN, "iid": Drawn.DRAWN}.get(self.how, Drawn.DRAWN_WITHOUT_EARLIER)
        for number in range(1 if self.how == "hybrid" else widest):
            tokens = draw_sample(logits, *laws.stats, level.sampling.seeds, roots, first_draw + number)
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
        borders = {index: _Border(tree, [-inf] * tree.limit) for index, tree in enumerate(trees) if tree.limit}
        most = max((tree.limit for tree in trees), default=0)
        for depth in range(self.depth):
            wanted = {index: border.nodes for index, border in borders.items() if border.nodes}
            if not wanted:
                break
            level = self._score(view, rows, trees, wanted, rng, depth)
            growing, width = [borders[index] for index in wanted], min(self.width, level.logits.shape[1])
            ahead = [score for border in growing for score in border.ahead]
            scores = from_host(ahead, torch.float32, self.source.device)
            tokens, found, best = self._expand(level, None, scores, level.shape.offsets, width, most)
            self._take(growing, width, tokens.flatten().tolist(), found.flatten().tolist(), best.tolist())
        return [_finish(tree, borders.get(index)) for index, tree in enumerate(trees)]

    def _take(
        self, growing: list[_Border], width: int, tokens: list[int], scores: list[float], best: list[list[int]]
    ) -> None:
        """Enter the children of a level, best first, as long as they may belong to the tree in the end."""
        start = 0
        scores.append(-inf)  # of child -1, which is none
        for border, order in zip(growing, best):
            gained = list(map(scores.__getitem__, order))
            # each that enters pushes the least of those before out; all that follow one that does not are worse still
            count = sum(map(gt, gained, border.best))
            border.best = sorted(border.best[count:] + gained[:count])
            entered, above, place, tree = order[:count], border.places, len(border.scores), border.staged
            border.scores += gained[:count]
            border.tokens += map(tokens.__getitem__, entered)
            border.parents += [above[child // width - start] for child in entered]
            # something below these may still belong
            going = [child for child in entered[: self.width] if scores[child] > border.best[0]]
            tree.parents += [border.nodes[child // width - start] for child in going]
            border.places = list(range(place, place + len(going)))
            border.nodes = list(range(len(tree.tokens), len(tree.parents)))
            border.ahead = gained[: len(going)]
            tree.tokens += map(tokens.__getitem__, going)
            start += len(above)

    def _pack(self, view: StateView, rows: Sequence[int], trees: list[_Tree], parts: list[Laws]) -> Draft:
        if self.needs.topology == "chain":
            draft = Draft.chains(rows, [tree.tokens for tree in trees], device=view.device)
        else:
            draft = Draft.trees(rows, [(tree.tokens, tree.parents) for tree in trees], device=view.device)
        if not parts or not any(any(tree.drawn) for tree in trees):
            return draft
        drawn = from_host([mark for tree in trees for mark in tree.drawn], torch.int8, view.device)
        law_row = from_host([row for tree in trees for row in tree.law_row], torch.int32, view.device)
        return replace(draft, drawn=drawn, law_row=law_row, laws=concat_laws(parts))


def _finish(tree: _Tree, border: _Border | None) -> _Tree:
    """The best nodes of all that were found; earlier ones first among equals, so that parents are kept."""
    if border is None:
        return tree
    order = sorted(range(len(border.scores)), key=border.scores.__getitem__, reverse=True)
    best = sorted(order[: tree.limit])
    place = {-1: 0, **{at: node for node, at in enumerate(best, 1)}}
    tokens = [tree.tokens[0], *(border.tokens[at] for at in best)]
    parents = [-1, *(place[border.parents[at]] for at in best)]
    return _Tree(tokens, tree.limit, parents)

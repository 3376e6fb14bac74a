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

import torch
from torch import Tensor

from specdec_fast.draft import Draft, Drawn, PackedShape, from_host, packed_shape
from specdec_fast.draft_source import Source
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_fast.laws import Laws, concat_laws
from specdec_fast.sampling import Sampling
from specdec_fast.shapes import Shape
from specdec_kernels import Growth, NodePaths, draw_sample, tree_expand, tree_grow

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

    def law(self, laws: Laws | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(1/T, cut, tie) that children are picked by."""
        return picking_law(self.logits, self.sampling, self.filtered, laws)

    def positions(self, depth: int) -> Tensor:
        """Per node: of what is so deep in its tree."""
        return (self.roots + depth)[self.shape.row_of]


def picking_law(
    logits: Tensor, sampling: Sampling, filtered: bool, laws: Laws | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(1/T, cut, tie) that children are picked by: at temperature 0 of the law at 1. laws: of these logits, if they are
    known already.
    """
    inv_t, cut, tie = sampling.unfiltered(logits)
    if filtered:
        laws = sampling.laws(logits) if laws is None else laws
        greedy = laws.inv_t == 0
        cut, tie = torch.where(greedy, cut, laws.cut), torch.where(greedy, tie, laws.tie_id)
    return inv_t, cut, tie


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
        self._growth: tuple[tuple[tuple[int, ...], torch.dtype], Growth] | None = None  # limits, dtype, memory
        self._most = shape.num_nodes if not depth else width + (depth - 1) * width * width
        self.num_draft_tokens = min(self._most, num_draft_tokens or (24 if depth else self._most))
        self.needs = replace(type(self).needs, laws=how not in CHOOSING, excludes=how == "hybrid")

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        self.source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        texts = [view.tokens(row) for row in rows]
        limits = tuple(
            limit if limit > 0 and self._room(row, len(text), limit) else 0
            for row, limit, text in zip(rows, (min(limit, self._most) for limit in budget.nodes), texts)
        )
        active = [index for index, limit in enumerate(limits) if limit]
        if not active:
            return Draft.chains(rows, [[text[-1]] for text in texts], device=view.device)
        self.source.catch_up([rows[index] for index in active], [texts[index] for index in active])
        if self.depth:
            return self._grow_best(view, rows, [text[-1] for text in texts], limits, rng)
        trees = [_Tree([text[-1]], limit, draws=rng.first_draw) for text, limit in zip(texts, limits)]
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
            staged = [trees[index] for index in nodes]
            draft = self._as_draft([rows[index] for index in nodes], staged, self.source.device)
            starts = accumulate(draft.counts, initial=0)
            ends = [start + node for start, some in zip(starts, nodes.values()) for node in some]
            counts = tuple(map(len, nodes.values()))
            level = self._score(view, rows, tuple(nodes), draft, counts, ends, rng, depth)
            self._grow(trees, wanted, level, parts)
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
        places: tuple[int, ...],
        draft: Draft,
        counts: tuple[int, ...],
        ends: list[int],
        rng: Rng,
        depth: int,
    ) -> _Level:
        """One pass over the trees that grow, and the draft's logits after the nodes that get children.

        places: of these trees' rows among `rows`; ends: these nodes, packed, `counts` of each tree.
        """
        own = [rows[place] for place in places]
        scored = self.source.score(own, draft)
        if ends[-1] - ends[0] + 1 == len(ends):
            scored = scored[ends[0] : ends[-1] + 1]
        else:
            scored = scored[from_host(ends, torch.int64, self.source.device)]
        logits, columns = self.source.logits(scored), self.source.token_ids
        sampling = view.sampling(own)
        if columns is not None and (self.how in CHOOSING or view.sampling(rows).edits is not None):
            # noise and edits go by the ids of the target
            spread = logits.new_full((logits.shape[0], self.source.vocab_size), float("-inf"))
            logits, columns = spread.index_copy_(1, columns, logits), None
        roots = rng.positions if len(own) == len(rows) else rng.positions[list(places)]
        shape = packed_shape(places, counts, self.source.device)
        if sampling.edits is not None:  # q with the target's edits, each node after its own path
            nodes = from_host(ends, torch.int32, logits.device)
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, nodes)
            logits = sampling.edits.apply(logits, paths, shape.row_of)
        noisy = self.how == "coupled" and not sampling.all_greedy
        filtered = sampling.any_filter and not sampling.all_greedy
        sampling = sampling.per_node(counts, shape.row_of)
        return _Level(shape, logits, columns, sampling, noisy, filtered, roots, depth)

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
        law, noise = level.law(laws), {}
        if level.noisy:
            places = level.positions(level.depth + 1)
            if level.filtered:  # or there is no row at temperature 0
                places = torch.where(level.sampling.temperature == 0, -1, places)
            noise = {"seeds": level.sampling.seeds, "positions": places}
        bounds = packed_shape((0,), (count,), device).offsets
        width = min(width, level.logits.shape[1])
        found = tree_expand(level.logits, *law, bounds, torch.zeros_like(law[0]), width=width, keep=1, **noise)
        return [[(token, Drawn.CHOSEN) for token in own if token >= 0] for own in found[0].tolist()]

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

    def _grow_best(
        self, view: StateView, rows: Sequence[int], roots: list[int], limits: tuple[int, ...], rng: Rng
    ) -> Draft:
        """Dynamic trees: grow from the best nodes of each level, then keep the best of all nodes, root always."""
        batch, sampling, noise = tuple(range(len(rows))), view.sampling(rows), {}
        if self.how == "coupled" and not sampling.all_greedy:
            places = rng.positions
            if sampling.any_filter:  # or there is no row at temperature 0
                places = torch.where(sampling.temperature == 0, -1, places)
            noise = {"seeds": sampling.seeds, "positions": places}
        # nodes that each tree grows from, and those that it has; a tree that does not grow any more has none
        fresh = counts = tuple(int(limit > 0) for limit in limits)
        growing = [at for at in batch if fresh[at]]
        growth: Growth | None = None
        logits: Tensor
        law: Sequence[Tensor]
        draft = Draft.chains([rows[at] for at in growing], [[roots[at]] for at in growing], device=self.source.device)
        for depth in range(self.depth):
            last = depth == self.depth - 1 or not growing
            if growing:
                stops = accumulate(draft.counts)
                ends = [node for at, stop in zip(growing, stops) for node in range(stop - fresh[at], stop)]
                own = tuple([fresh[at] for at in growing])
                level = self._score(view, rows, tuple(growing), draft, own, ends, rng, depth)
                logits, law = level.logits, level.law()
                growth = growth or self._room_for(roots, limits, law[0].dtype)
            else:  # what was found is all there is
                logits, law = logits[:0], [part[:0] for part in law]
            bounds = packed_shape(batch, fresh, logits.device).offsets
            sizes = {"level": depth, "width": self.width, "last": last, "sharpness": self.sharpness}
            tokens, parents, found, plan = tree_grow(logits, *law, bounds, growth, **sizes, **noise)
            now, deepest = found.tolist()
            fresh, counts = tuple([max(new - old, 0) for new, old in zip(now, counts)]), now
            growing = [at for at in batch if now[at]]
            whole = tuple([now[at] for at in growing])
            draft = Draft.packed([rows[at] for at in growing], tokens, parents, whole, max(deepest), plan)
            if last:
                break
        return draft

    def _room_for(self, roots: list[int], limits: tuple[int, ...], dtype: torch.dtype) -> Growth:
        """Where trees of these limits grow: what the last ones had, if their limits were the same."""
        if self._growth is None or self._growth[0] != (limits, dtype):
            with torch.inference_mode(False):
                most = from_host(limits, torch.int32, self.source.device)
                self._growth = (limits, dtype), Growth.room(most, max(limits), self.depth, dtype)
        growth = self._growth[1]
        growth.tokens[:, 0] = from_host(roots, torch.int64, self.source.device)
        return growth

    def _pack(self, view: StateView, rows: Sequence[int], trees: list[_Tree], parts: list[Laws]) -> Draft:
        draft = self._as_draft(rows, trees, view.device)
        if not parts or not any(any(tree.drawn) for tree in trees):
            return draft
        drawn = from_host([mark for tree in trees for mark in tree.drawn], torch.int8, view.device)
        law_row = from_host([row for tree in trees for row in tree.law_row], torch.int32, view.device)
        return replace(draft, drawn=drawn, law_row=law_row, laws=concat_laws(parts))

    def _as_draft(self, rows: Sequence[int], trees: list[_Tree], device: torch.device) -> Draft:
        if self.shape.is_chain:
            return Draft.chains(rows, [tree.tokens for tree in trees], device=device)
        return Draft.trees(rows, [(tree.tokens, tree.parents) for tree in trees], device=device)

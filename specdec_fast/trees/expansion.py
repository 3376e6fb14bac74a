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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.trees.dynamic import Front, grow, reads_freely
from specdec_fast.trees.logits_source import Source
from specdec_fast.trees.static_layout import EMPTY, StaticLayout, static_layout
from specdec_fast.trees.topology import Shape
from specdec_kernels import Growth, NodePaths, draft_sample, tree_expand
from specdec_kernels.names import unknown_name

HOWS = ("coupled", "hybrid", "iid", "top_k", "without_replacement")
CHOOSING = ("coupled", "top_k")


@dataclass(slots=True)
class _Level:
    """Nodes that get children, in packed order, and what they need."""

    shape: ChainLayout  # by tree
    logits: Tensor
    columns: Tensor | None  # int64 [columns of the logits] their target ids, None where these are the same
    sampling: SamplingTensors  # per node
    noisy: bool  # children are picked under the replay noise, in some row at least
    filtered: bool  # some row has top-k, top-p or min-p
    greedy: bool  # some row may be at temperature 0
    roots: Tensor  # positions of the trees' roots
    depth: int

    def dist(self, dists: TokenDistributions | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(1/T, cut, tie) that children are picked by."""
        return picking_dist(self.logits, self.sampling, self.filtered, dists)

    def positions(self, depth: int) -> Tensor:
        """Per node: of what is so deep in its tree."""
        return (self.roots + depth)[self.shape.row_of]


def picking_dist(
    logits: Tensor, sampling: SamplingTensors, filtered: bool, dists: TokenDistributions | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(1/T, cut, tie) that children are picked by: at temperature 0 of the distribution at 1. distributions: of these
    logits, if they are known already.
    """
    inv_t, cut, tie = sampling.unfiltered_stats(logits)
    if filtered:
        dists = sampling.distributions(logits) if dists is None else dists
        greedy = dists.inv_t == 0
        cut, tie = torch.where(greedy, cut, dists.cut), torch.where(greedy, tie, dists.tie_id)
    return inv_t, cut, tie


class TreeDrafter:
    """Drafts trees that grow by the logits of `source`.

    shape: of a static tree; depth: above 0, levels of a dynamic tree in its place, `width` nodes of each grown, `width`
    children looked at of each, scored as if the source's distribution were raised to the power `sharpness`;
    num_draft_tokens: the default budget per row (default: all of a static tree, 24 of a dynamic one); how: one of
    `HOWS`.

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
            raise ValueError(unknown_name(f"{self.name} how", how, HOWS))
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
        self.needs = replace(type(self).needs, dists=how not in CHOOSING, excludes_siblings=how == "hybrid")

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
        roots = [text[-1] for text in texts]
        if not self.depth:
            return self._fill(view, rows, roots, limits, rng)
        if len(active) == len(rows):
            return self._grow_best(view, rows, roots, limits, rng)
        at = host_to_device(active, torch.int64, view.device)
        own = replace(rng, seeds=rng.seeds[at], positions=rng.positions[at])
        ids, newest = [rows[index] for index in active], [roots[index] for index in active]
        return self._grow_best(view, ids, newest, [limits[index] for index in active], own).with_missing_rows(
            rows, roots
        )

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        self.source.observe(view, draft, acceptance, output)

    def release(self, rows: Sequence[int]) -> None:
        self.source.release(rows)

    def _room(self, row: int, tokens: int, limit: int) -> bool:
        """Whether a row of so many tokens can be drafted for: what it may hold while its tree grows has room."""
        return self.source.room(row, tokens, tokens + max(limit, (self.depth - 1) * self.width))

    def _level(
        self,
        view: StateView,
        rows: Sequence[int],
        places: tuple[int, ...],
        draft: Draft,
        scored: Tensor,
        counts: tuple[int, ...],
        ends: list[int] | Tensor,
        rng: Rng,
        depth: int,
    ) -> _Level:
        """The source's logits after nodes of a draft that get children. places: of the draft's rows among `rows`;
        scored: what the source made of the draft; ends: these nodes, packed, `counts` of each row.
        """
        own = [rows[place] for place in places]
        if isinstance(ends, Tensor):
            scored = scored[ends]
        elif ends[-1] - ends[0] + 1 == len(ends):
            scored = scored[ends[0] : ends[-1] + 1]
        else:
            scored = scored[host_to_device(ends, torch.int64, self.source.device)]
        logits, columns = self.source.logits(scored), self.source.token_ids
        sampling = view.sampling(own)
        if columns is not None and (self.how in CHOOSING or view.sampling(rows).logits_processors is not None):
            # noise and edits go by the ids of the target
            spread = logits.new_full((logits.shape[0], self.source.vocab_size), float("-inf"))
            logits, columns = spread.index_copy_(1, columns, logits), None
        roots = rng.positions
        if len(own) < len(rows):
            roots = roots[host_to_device(places, torch.int64, roots.device)]
        shape = chain_layout(places, counts, self.source.device)
        if sampling.logits_processors is not None:  # q with the target's edits, each node after its own path
            nodes = ends.int() if isinstance(ends, Tensor) else host_to_device(ends, torch.int32, logits.device)
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, nodes)
            logits = sampling.logits_processors.apply(logits, paths, shape.row_of)
        noisy = self.how == "coupled" and not sampling.all_greedy
        filtered, greedy = sampling.any_filter and not sampling.all_greedy, sampling.any_greedy
        sampling = sampling.expand_to_nodes(counts, shape.row_of)
        return _Level(shape, logits, columns, sampling, noisy, filtered, greedy, roots, depth)

    def _fill(self, view: StateView, rows: Sequence[int], roots: list[int], limits: tuple[int, ...], rng: Rng) -> Draft:
        """Static trees: levels are picked on the device, and the host looks at what was picked when all of them are."""
        lines = static_layout(self.shape, limits, self.source.device)
        table = lines.table(roots)
        tokens, proposal_kinds = table
        parts: list[TokenDistributions] = []
        for depth, step in enumerate(lines.levels):
            own = [rows[place] for place in step.places]
            which = chain_layout(tuple(own), step.draft.counts, self.source.device).rows
            draft = replace(step.draft, rows=which, row_ids=tuple(own), tokens=tokens[step.staged].clamp(min=0))
            scored = self.source.score(own, draft)
            level = self._level(view, rows, step.places, draft, scored, step.sizes, step.ends, rng, depth)
            if self.how in CHOOSING:
                picked = self._choose(level, None, step.widest)
            else:
                dists = level.sampling.distributions(level.logits)
                parts.append(replace(dists, token_ids=level.columns))
                first = lines.numbers(tokens, step) + rng.first_draw
                picked, marks = self._draw(level, dists, step.children, step.widest, first)
                proposal_kinds[step.at] = marks.flatten()[step.picked]
                if level.columns is not None:
                    picked = torch.where(picked == EMPTY, EMPTY, level.columns[picked.clamp(min=0)])
            tokens[step.at] = torch.where(tokens[step.above] == EMPTY, EMPTY, picked.flatten()[step.picked])
        return self._pack(view, rows, limits, lines, table.tolist(), parts)

    def _choose(self, level: _Level, dists: TokenDistributions | None, width: int) -> Tensor:
        """The `width` best children of every node, int64 [nodes, width], EMPTY behind the last."""
        count, device = level.logits.shape[0], level.logits.device
        dist, noise = level.dist(dists), {}
        if level.noisy:
            places = level.positions(level.depth + 1)
            if level.filtered:  # or there is no row at temperature 0
                places = torch.where(level.sampling.temperature == 0, -1, places)
            noise = {"seeds": level.sampling.seeds, "positions": places}
        bounds = chain_layout((0,), (count,), device).offsets
        most = min(width, level.logits.shape[1])
        found = tree_expand(level.logits, *dist, bounds, torch.zeros_like(dist[0]), width=most, keep=1, **noise)[0]
        return found if most == width else pad(found, (0, width - most), value=EMPTY)

    def _draw(
        self, level: _Level, dists: TokenDistributions, children: Tensor, widest: int, first_draw: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and marks [nodes, widest] of every node's children, so many, in the order in which they are to be
        tested, EMPTY behind the last: where a draw finds nothing, no later one does.
        """
        (nodes, columns), hybrid = dists.logits.shape, self.how == "hybrid"
        greedy, roots = dists.inv_t == 0, level.positions(0)
        logits = dists.logits.new_empty(nodes, columns + 1)  # the last column is for nobody
        logits[:, :columns] = dists.logits
        left = logits[:, :columns]
        tops = children.new_full((nodes, widest), EMPTY, dtype=torch.int64)
        if hybrid or level.greedy:
            wanted = torch.where(greedy, children, children - 1 if hybrid else 0)
            rank = torch.arange(widest, device=children.device)
            tops = torch.where(rank < wanted[:, None], self._choose(level, dists, widest), EMPTY)
            logits.scatter_(1, torch.where(tops == EMPTY, columns, tops), float("-inf"))
        mark = {"hybrid": ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, "iid": ProposalKind.SAMPLED}.get(
            self.how, ProposalKind.SAMPLED_WITHOUT_EARLIER
        )
        sound, draws = ~greedy & ~torch.isnan(dists.lse), []
        for number in range(1 if hybrid else widest):
            token = draft_sample(left, *dists.stats, level.sampling.seeds, roots, first_draw + number)
            here = left.gather(1, token[:, None]).squeeze(1).to(dists.cut.dtype)
            kept = (here > dists.cut) | ((here == dists.cut) & (token <= dists.tie_id))
            draws.append(torch.where(sound & kept & (here > float("-inf")) & (children > number), token, EMPTY))
            if mark == ProposalKind.SAMPLED_WITHOUT_EARLIER:
                logits.scatter_(1, torch.where(draws[-1] == EMPTY, columns, draws[-1])[:, None], float("-inf"))
        tokens = torch.stack(draws, 1)
        if hybrid:
            tokens = torch.where(tokens == EMPTY, tops, torch.cat([tokens, tops[:, :-1]], 1))
            marked = (draws[0] != EMPTY)[:, None] & (torch.arange(widest, device=tokens.device) == 0)
        else:
            tokens, marked = torch.where(greedy[:, None], tops, tokens), ~greedy[:, None].expand_as(tokens)
        return tokens, torch.where(marked, int(mark), int(ProposalKind.DETERMINISTIC))

    def _grow_best(
        self, view: StateView, rows: Sequence[int], roots: Sequence[int], limits: Sequence[int], rng: Rng
    ) -> Draft:
        """Dynamic trees of rows that all draft: the host looks at them once, when they are grown."""
        sampling, noise = view.sampling(rows), {}
        if self.how == "coupled" and not sampling.all_greedy:
            places = rng.positions
            if sampling.any_filter:  # or there is no row at temperature 0
                places = torch.where(sampling.temperature == 0, -1, places)
            noise = {"seeds": sampling.seeds, "positions": places}
        first = Draft.chains(rows, [[root] for root in roots], device=self.source.device)
        passes = _Passes(self, view, rows, limits, rng, first, self.source.score(rows, first))
        front = Front(0, first.counts, first.offsets, list(range(len(rows))))
        known = tuple(rows) if reads_freely(self.source.device) else None
        depth, width, sharpness = min(self.depth, max(limits)), self.width, self.sharpness
        trees = grow(
            passes, first.rows, front, depth=depth, width=width, sharpness=sharpness, noise=noise, row_ids=known
        )
        staged = reversed(trees.staged) if self.source.keeps else ()
        parts = [part for draft in staged for part in (draft.offsets, draft.tokens, draft.parents)]
        numbers = _numbers([trees.counts.flatten(), *parts])
        sizes = next(numbers)
        counts, deepest = sizes[: len(rows)], max(sizes[len(rows) :])
        if self.source.keeps:
            self.source.told(_last_staged(rows, roots, zip(numbers, numbers, numbers)))
        return Draft.packed(rows, trees.tokens, trees.parents, tuple(counts), deepest, trees.plan)

    def _room_for(self, roots: Tensor, limits: Sequence[int], dtype: torch.dtype) -> Growth:
        """Where trees of these limits grow: what the last ones had, if their limits were the same. roots: tokens."""
        key = tuple(limits), dtype
        if self._growth is None or self._growth[0] != key:
            with torch.inference_mode(False):
                most = host_to_device(limits, torch.int32, self.source.device)
                self._growth = key, Growth.room(most, max(limits), self.depth, dtype)
        growth = self._growth[1]
        growth.tokens[:, 0] = roots
        return growth

    def _pack(
        self,
        view: StateView,
        rows: Sequence[int],
        limits: tuple[int, ...],
        lines: StaticLayout,
        table: list[list[int]],
        parts: list[TokenDistributions],
    ) -> Draft:
        """The trees without their empty places. table: tokens and how they were picked."""
        trees, marks = lines.trees(table[0]), lines.trees(table[1])
        self.source.told([(row, tree) for row, tree, limit in zip(rows, trees, limits) if limit])
        proposal_kinds: list[int] = []
        dist_index: list[int] = []
        for at, ((tokens, parents), (how, _), sources) in enumerate(zip(trees, marks, lines.sources)):
            if EMPTY in tokens:
                kept = [node for node, token in enumerate(tokens) if token != EMPTY]
                place = {node: new for new, node in enumerate(kept)}
                trees[at] = [tokens[node] for node in kept], [place.get(parents[node], -1) for node in kept]
                how, sources = [how[node] for node in kept], [sources[node] for node in kept]
            proposal_kinds += how
            dist_index += [source if mark != ProposalKind.DETERMINISTIC else -1 for mark, source in zip(how, sources)]
        if self.shape.is_chain:
            draft = Draft.chains(rows, [tokens for tokens, _ in trees], device=view.device)
        else:
            draft = Draft.trees(rows, trees, device=view.device)
        if not any(proposal_kinds):
            return draft
        marked, named = (
            host_to_device(proposal_kinds, torch.int8, view.device),
            host_to_device(dist_index, torch.int32, view.device),
        )
        return replace(draft, proposal_kinds=marked, dist_index=named, dists=concat_distributions(parts))


@dataclass(slots=True)
class _Passes:
    """Over dynamic trees of rows that all draft. draft: what the last pass scored."""

    drafter: TreeDrafter
    view: StateView
    rows: Sequence[int]
    limits: Sequence[int]
    rng: Rng
    draft: Draft
    scored: Tensor

    def dists(self, front: Front) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = tuple(range(len(self.rows)))
        sizes = places, self.draft, self.scored, front.sizes, front.places, self.rng, front.level
        level = self.drafter._level(self.view, self.rows, *sizes)
        return level.logits, *level.dist()

    def score(self, draft: Draft) -> None:
        self.draft, self.scored = draft, self.drafter.source.score(self.rows, draft)

    def room(self, dtype: torch.dtype) -> Growth:
        return self.drafter._room_for(self.draft.tokens, self.limits, dtype)  # so far each tree is its root


def _numbers(parts: Sequence[Tensor]) -> Iterator[list[int]]:
    """What stands in vectors: the host waits for a device once, and of its own memory reads what is asked for."""
    if reads_freely(parts[0].device):
        yield from (part.tolist() for part in parts)
        return
    numbers = iter(torch.cat(list(parts)).tolist())
    for part in parts:
        yield list(islice(numbers, part.shape[0]))


def _last_staged(
    rows: Sequence[int], roots: Sequence[int], passes: Iterable[tuple[list[int], list[int], list[int]]]
) -> list[tuple[int, tuple[list[int], list[int]]]]:
    """(row, tree) of every row as it was scored last. passes: offsets, tokens and parents of each, the last first."""
    trees: dict[int, tuple[list[int], list[int]]] = {}
    for offsets, tokens, parents in passes:
        for row, (start, stop) in zip(rows, pairwise(offsets)):
            if stop > start and row not in trees:
                trees[row] = tokens[start:stop], parents[start:stop]
        if len(trees) == len(rows):
            break
    return [(row, trees.get(row, ([root], [-1]))) for row, root in zip(rows, roots)]

"""Trees that grow level by level from a model's logits: static topologies, and dynamic trees that keep the best nodes.

Drafters with a draft model and drafters with a trained head share this code; the source stages, scores and rolls back.

Static trees have a fixed topology, and no sampled token is dropped. Siblings are picked in one of these ways (`how`):

- `coupled`: the largest under the replay noise that the target will use (Gumbel top-k, Kool et al. 2019);
- `hybrid`: the likeliest ones, and one sampled without them, which is tested first (Hu et al. 2025);
- `without_replacement`: sampled without replacement (Jeon et al. 2024);
- `iid`: sampled independently (Miao et al. 2024);
- `top_k`: the likeliest ones.

At temperature 0 all of them pick the likeliest tokens.

Dynamic trees (`depth` above 0) grow from the most promising nodes and keep the best of all nodes (Li et al. 2024,
EAGLE-2, section 4). They drop tokens depending on the tokens, so these must be deterministic: `coupled` or `top_k`.
Tests: tests/drafters/test_draft_tree.py, test_eagle.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.core.finite_logits import require_finite_logits
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_fast.trees.dynamic import Frontier, grow, host_reads_are_free
from specdec_fast.trees.logits_source import Source
from specdec_fast.trees.sibling_picking import (
    DETERMINISTIC_HOWS,
    HOWS,
    ParentNodes,
    pick_best,
    sample_children,
)
from specdec_fast.trees.static_layout import EMPTY, StaticLayout, static_layout
from specdec_fast.trees.static_shape import Shape
from specdec_kernels import Growth, NodePaths
from specdec_kernels.unknown_names import unknown_name


class TreeDrafter:
    """Drafts trees that grow by the logits of a source. The base of drafters with draft models and recurrent heads.

    Every level is one pass over the whole tree so far. Keys and values of accepted nodes are kept if the source keeps
    them.

    Args:
        source: The source of logits, over a cache of its own.
        shape: Topology of static trees.
        depth: Levels of a dynamic tree. 0: a static tree.
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        num_draft_tokens: Default budget per row. None: all nodes of a static tree, 24 of a dynamic one.
        how: How siblings are picked: one of `HOWS`.
        sharpness: Exponent on the source's distribution in the scores of a dynamic tree.

    Raises:
        ValueError: If an option is out of range, or if a dynamic tree is to sample tokens.
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
        if depth and how not in DETERMINISTIC_HOWS:
            raise ValueError(
                f"{self.name} depth: got {depth} with how={how}; expected depth=0, or no shape and "
                f"how={' or '.join(DETERMINISTIC_HOWS)}: a dynamic tree drops tokens that it has picked"
            )
        self.source, self.shape = source, shape
        self.how, self.depth, self.width, self.sharpness = how, depth, width, sharpness
        self._root_logits: Tensor | None = None  # of the rows that draft in this step, if their check would wait
        self._growth: tuple[tuple[tuple[int, ...], torch.dtype], Growth] | None = None  # limits, dtype, memory
        self._max_nodes = shape.num_nodes if not depth else width + (depth - 1) * width * width
        self.num_draft_tokens = min(self._max_nodes, num_draft_tokens or (24 if depth else self._max_nodes))
        self.needs = replace(type(self).needs, dists=how not in DETERMINISTIC_HOWS, excludes_siblings=how == "hybrid")

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds the rows to the source of logits."""
        self.source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Expands trees level by level. Raises ValueError if the source's logits are not finite."""
        texts = [view.tokens(row) for row in rows]
        limits = tuple(
            limit if limit > 0 and self._reserve(row, len(text), limit) else 0
            for row, limit, text in zip(rows, (min(limit, self._max_nodes) for limit in budget.nodes), texts)
        )
        active = [index for index, limit in enumerate(limits) if limit]
        if not active:
            return Draft.chains(rows, [[text[-1]] for text in texts], device=view.device)
        self.source.catch_up([rows[index] for index in active], [texts[index] for index in active])
        roots = [text[-1] for text in texts]
        if not self.depth:
            draft = self._fill_static(view, rows, roots, limits, rng)
        elif len(active) == len(rows):
            draft = self._grow_dynamic(view, rows, roots, limits, rng)
        else:
            at = host_to_device(active, torch.int64, view.device)
            own = replace(rng, seeds=rng.seeds[at], positions=rng.positions[at])
            ids, newest = [rows[index] for index in active], [roots[index] for index in active]
            grown = self._grow_dynamic(view, ids, newest, [limits[index] for index in active], own)
            draft = grown.with_missing_rows(rows, roots)
        logits, self._root_logits = self._root_logits, None
        empty = [place for place, index in enumerate(active) if draft.counts[index] == 1]
        if logits is not None and empty:
            require_finite_logits(self.name, logits[host_to_device(empty, torch.int64, logits.device)])
        return draft

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Passes the step on to the source of logits."""
        self.source.observe(view, draft, acceptance, output)

    def release(self, rows: Sequence[int]) -> None:
        """Releases the rows in the source of logits."""
        self.source.release(rows)

    def _reserve(self, row: int, tokens: int, limit: int) -> bool:
        """Reserves space for a row of `tokens` tokens and its growing tree; returns whether it is available."""
        return self.source.reserve(row, tokens, tokens + max(limit, (self.depth - 1) * self.width))

    def _build_level(
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
    ) -> ParentNodes:
        """Builds the inputs of a level: the source's logits after the nodes that get children.

        Args:
            view: Committed data.
            rows: Rows of the step.
            places: Places of the draft's rows among `rows`.
            draft: The draft so far.
            scored: The source's result for `draft`.
            counts: Number of nodes that get children, per row of the draft.
            ends: These nodes, packed row after row.
            rng: Keys of the random numbers.
            depth: Depth of these nodes.

        Returns:
            The nodes with their logits.

        Raises:
            ValueError: If logits are not finite, on a device that the host reads without waiting.
        """
        own = [rows[place] for place in places]
        if isinstance(ends, Tensor):
            scored = scored[ends]
        elif ends[-1] - ends[0] + 1 == len(ends):
            scored = scored[ends[0] : ends[-1] + 1]
        else:
            scored = scored[host_to_device(ends, torch.int64, self.source.device)]
        logits, columns = self.source.logits(scored), self.source.token_ids
        if host_reads_are_free(logits.device):
            require_finite_logits(self.name, logits)
        elif depth == 0:
            self._root_logits = logits  # checked if a row has no draft
        sampling = view.sampling(own)
        if columns is not None and (
            self.how in DETERMINISTIC_HOWS or view.sampling(rows).logits_processors is not None
        ):
            # noise and logits processors use the target's ids
            spread = logits.new_full((logits.shape[0], self.source.vocab_size), float("-inf"))
            logits, columns = spread.index_copy_(1, columns, logits), None
        roots = rng.positions
        if len(own) < len(rows):
            roots = roots[host_to_device(places, torch.int64, roots.device)]
        shape = chain_layout(places, counts, self.source.device)
        if sampling.logits_processors is not None:  # the target's processors apply to q too
            nodes = ends.int() if isinstance(ends, Tensor) else host_to_device(ends, torch.int32, logits.device)
            paths = NodePaths(draft.tokens, draft.parents, draft.offsets, roots, nodes)
            logits = sampling.logits_processors.apply_to_draft(logits, paths, shape.row_of)
        noisy = self.how == "coupled" and not sampling.all_greedy
        filtered, greedy = sampling.any_filter and not sampling.all_greedy, sampling.any_greedy
        sampling = sampling.expand_to_nodes(counts, shape.row_of)
        return ParentNodes(shape, logits, columns, sampling, noisy, filtered, greedy, roots, depth)

    def _fill_static(
        self, view: StateView, rows: Sequence[int], roots: list[int], limits: tuple[int, ...], rng: Rng
    ) -> Draft:
        """Static trees: all levels are picked on the device, and the host reads the tokens once at the end."""
        layout = static_layout(self.shape, limits, self.source.device)
        table = layout.table(roots)
        tokens, proposal_kinds = table
        parts: list[TokenDistributions] = []
        for depth, step in enumerate(layout.levels):
            own = [rows[place] for place in step.places]
            which = chain_layout(tuple(own), step.draft.counts, self.source.device).rows
            draft = replace(step.draft, rows=which, row_ids=tuple(own), tokens=tokens[step.staged].clamp(min=0))
            scored = self.source.score(own, draft)
            level = self._build_level(view, rows, step.places, draft, scored, step.sizes, step.ends, rng, depth)
            if self.how in DETERMINISTIC_HOWS:
                picked = pick_best(level, None, step.widest)
            else:
                dists = level.sampling.distributions(level.logits)
                parts.append(replace(dists, token_ids=level.columns))
                first = layout.draw_numbers(tokens, step) + rng.first_draw
                picked, marks = sample_children(level, dists, step.children, step.widest, first, self.how)
                proposal_kinds[step.at] = marks.flatten()[step.picked]
                if level.columns is not None:
                    picked = torch.where(picked == EMPTY, EMPTY, level.columns[picked.clamp(min=0)])
            tokens[step.at] = torch.where(tokens[step.above] == EMPTY, EMPTY, picked.flatten()[step.picked])
        return self._pack_static(view, rows, limits, layout, table.tolist(), parts)

    def _grow_dynamic(
        self, view: StateView, rows: Sequence[int], roots: Sequence[int], limits: Sequence[int], rng: Rng
    ) -> Draft:
        """Dynamic trees of rows that all draft. The host reads them once, at the end."""
        sampling, noise = view.sampling(rows), {}
        if self.how == "coupled" and not sampling.all_greedy:
            places = rng.positions
            if sampling.any_filter:  # otherwise no row is at temperature 0
                places = torch.where(sampling.temperature == 0, -1, places)
            noise = {"seeds": sampling.seeds, "positions": places}
        first = Draft.chains(rows, [[root] for root in roots], device=self.source.device)
        forward = _Forward(self, view, rows, limits, rng, first, self.source.score(rows, first))
        frontier = Frontier(0, first.counts, first.offsets, list(range(len(rows))))
        known = tuple(rows) if host_reads_are_free(self.source.device) else None
        depth, width, sharpness = min(self.depth, max(limits)), self.width, self.sharpness
        trees = grow(
            forward, first.rows, frontier, depth=depth, width=width, sharpness=sharpness, noise=noise, row_ids=known
        )
        staged = reversed(trees.staged) if self.source.keeps_staged_keys else ()
        parts = [part for draft in staged for part in (draft.offsets, draft.tokens, draft.parents)]
        numbers = _read_vectors([trees.counts.flatten(), *parts])
        sizes = next(numbers)
        counts, deepest = sizes[: len(rows)], max(sizes[len(rows) :])
        if self.source.keeps_staged_keys:
            self.source.record_trees(_last_staged(rows, roots, zip(numbers, numbers, numbers)))
        return Draft.packed(rows, trees.tokens, trees.parents, tuple(counts), deepest, trees.plan)

    def _allocate(self, roots: Tensor, limits: Sequence[int], dtype: torch.dtype) -> Growth:
        """Memory for trees of these limits, reused while the limits stay the same. roots: tokens."""
        key = tuple(limits), dtype
        if self._growth is None or self._growth[0] != key:
            with torch.inference_mode(False):
                most = host_to_device(limits, torch.int32, self.source.device)
                self._growth = key, Growth.room(most, max(limits), self.depth, dtype)
        growth = self._growth[1]
        growth.tokens[:, 0] = roots
        return growth

    def _pack_static(
        self,
        view: StateView,
        rows: Sequence[int],
        limits: tuple[int, ...],
        layout: StaticLayout,
        table: list[list[int]],
        parts: list[TokenDistributions],
    ) -> Draft:
        """The trees without their empty places. table: tokens and proposal kinds."""
        trees, marks = layout.trees(table[0]), layout.trees(table[1])
        self.source.record_trees([(row, tree) for row, tree, limit in zip(rows, trees, limits) if limit])
        proposal_kinds: list[int] = []
        dist_index: list[int] = []
        for at, ((tokens, parents), (how, _), sources) in enumerate(zip(trees, marks, layout.sources)):
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
class _Forward:
    """Passes over dynamic trees of rows that all draft. draft: the one that the last pass scored."""

    drafter: TreeDrafter
    view: StateView
    rows: Sequence[int]
    limits: Sequence[int]
    rng: Rng
    draft: Draft
    scored: Tensor

    def dists(self, frontier: Frontier) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places = tuple(range(len(self.rows)))
        sizes = places, self.draft, self.scored, frontier.sizes, frontier.places, self.rng, frontier.level
        level = self.drafter._build_level(self.view, self.rows, *sizes)
        return level.logits, *level.pick_stats()

    def score(self, draft: Draft) -> None:
        self.draft, self.scored = draft, self.drafter.source.score(self.rows, draft)

    def allocate(self, dtype: torch.dtype) -> Growth:
        return self.drafter._allocate(self.draft.tokens, self.limits, dtype)  # each tree is its root so far


def _read_vectors(parts: Sequence[Tensor]) -> Iterator[list[int]]:
    """Reads vectors on the host, with one wait for a device. On a CPU, vectors are read as they are requested."""
    if host_reads_are_free(parts[0].device):
        yield from (part.tolist() for part in parts)
        return
    numbers = iter(torch.cat(list(parts)).tolist())
    for part in parts:
        yield list(islice(numbers, part.shape[0]))


def _last_staged(
    rows: Sequence[int], roots: Sequence[int], passes: Iterable[tuple[list[int], list[int], list[int]]]
) -> list[tuple[int, tuple[list[int], list[int]]]]:
    """(row, tree) of every row as scored last. passes: offsets, tokens and parents of each, the last one first."""
    trees: dict[int, tuple[list[int], list[int]]] = {}
    for offsets, tokens, parents in passes:
        for row, (start, stop) in zip(rows, pairwise(offsets)):
            if stop > start and row not in trees:
                trees[row] = tokens[start:stop], parents[start:stop]
        if len(trees) == len(rows):
            break
    return [(row, trees.get(row, ([root], [-1]))) for row, root in zip(rows, roots)]

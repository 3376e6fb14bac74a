"""Automatic drafting without a model: joins trees of `suffix` and `recycling`, and scores only the nodes that pay.

Both drafters propose trees, which costs little. Each says how confident it is in its proposal. The text
then shows how far each proposal was right, whether it was scored or not, so acceptance is learned for every level of
confidence without extra target passes. Seconds of target passes are measured when the drafter is built and corrected in
every step. A step scores the nodes with the most expected tokens per second, or none. A drafter that may miss steps
pauses while it costs more time than its nodes are expected to save. Its share of the time around the drafters counts as
its cost. A drafter may have a method `ends_rest(view, rows)`. It is then asked in its pauses, observes their steps, and
takes part in a step for which the method returns True. Where all drafters pause, they see one step in four, so a pause
costs next to nothing. `catch_up(view, rows)`, if there is one, gets the rest before a row leaves.
Tests: tests/drafters/test_auto.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import merge
from time import perf_counter
from typing import Any

from specdec_fast.adaptive.cost_model import Lengths, TimeTable, survival
from specdec_fast.adaptive.pass_times import PASSES, measure_pass_times
from specdec_fast.adaptive.rest import Rest
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Drafter, DrafterParts, Needs, Rng, StateView, TargetOutput

_MARGIN = 0.02  # required gain over a plain step, as a share of the speed
_SEEN = 4  # where all drafters pause, they see one of so many steps
_FRUGAL = {"recycling": {"learn_prompts": False}}  # options that keep a drafter from costing target passes
Tree = tuple[list[int], list[int]]  # tokens and parents, the root first


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What one source proposed for one row.

    Attributes:
        tree: Tokens and parents of all proposed nodes, the likeliest path first.
        depths: Depth of each node.
        key: Source and its level of confidence.
    """

    tree: Tree
    depths: list[int]
    key: tuple[int, int]


class AutoDrafter:
    """Joins the proposals of drafters that need no model, cut to the nodes that pay.

    Scored nodes depend on measured times. Rules that replay and greedy ones return the same text whatever is scored.
    Other rules key their uniforms by the request (`Needs.cross_request`).

    Args:
        of: The drafters. Their tokens are deterministic, their trees list likelier nodes first, and they have
            `confidence`, `level_rates` and `grow_trees` (see `SuffixDrafter`). By name, `from_parts` accepts "a,b"; its
            default is suffix and recycling.
        num_draft_tokens: Most nodes of a row.

    Attributes:
        pass_times: Seconds of target passes by nodes. Without a prior, all proposed nodes are scored.

    Raises:
        ValueError: If there are no drafters, if one has no confidence, or if `num_draft_tokens` is below 1.

    Source:
        Liu et al. 2024 (TurboSpec), for goodput; Oliaro et al. 2024 and Luo et al. 2024 for the two drafters.
    """

    name = "auto"
    needs = Needs(topology="tree", host_tokens=True, logits=True, cross_request=True, follows_clock=True)

    def __init__(self, of: Sequence[Any] = (), num_draft_tokens: int = 16) -> None:
        if not of or any(isinstance(source, str) for source in of):
            raise ValueError(f"auto of: got {of!r}; expected drafters; pass drafter='auto' to load()")
        if num_draft_tokens < 1:
            raise ValueError(f"auto num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        parts = "level_rates", "grow_trees"
        unfit = next((source.name for source in of if not all(hasattr(source, part) for part in parts)), None)
        if unfit is not None:
            raise ValueError(f"auto of: got {unfit}, which states no confidence; expected suffix or recycling")
        self.num_draft_tokens = num_draft_tokens
        self.sources = list(of)
        self.pass_times = TimeTable()
        # accepted tokens by source and level of confidence: all of them, and the latest
        self._accepted: dict[tuple[int, int], tuple[Lengths, Lengths]] = {}
        self._last: Draft | None = None
        self._plain: tuple[int, ...] = ()  # rows of a step in which none of them has a draft
        self._paused_steps, self._unseen = 0, False
        self._view: StateView | None = None
        self._proposals: list[list[_Proposal]] = []  # by row
        self._started = 0.0
        self._rests = {at: Rest() for at, source in enumerate(of) if getattr(source, "may_rest", False)}
        self._costs = [0.0] * len(of)  # seconds of each source in this step
        self._saved = [0.0] * len(of)  # seconds that the nodes of each source are expected to save in this step
        self._shared_cost = 0.0  # seconds of this step that no source needed alone
        self._resting: set[int] = set()
        self._rows: set[int] = set()

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"of": "suffix,recycling"}

    @classmethod
    def from_parts(
        cls, parts: DrafterParts, of: str | Sequence[str] = "suffix,recycling", num_draft_tokens: int = 16
    ) -> AutoDrafter:
        """Builds drafters by name, which do not read prompts with the target, and measures the target's passes."""
        names = of.split(",") if isinstance(of, str) else list(of)
        made = cls([parts.make(name, **_FRUGAL.get(name, {})) for name in names], num_draft_tokens)
        made.pass_times.prior = measure_pass_times(parts.target, {*PASSES, 1 + num_draft_tokens})
        return made

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds the rows to all drafters. The first row of all ends pauses."""
        if not self._rows:
            for rest in self._rests.values():
                rest.end()
        self._rows |= {*rows}
        for source in self.sources:
            source.begin(view, rows, prompt_output)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft | None:
        """Joins the nodes that pay, of the proposals of all drafters. None if they propose nothing, or pause."""
        began = perf_counter()
        self._last, self._plain, self._view = None, tuple(rows), view
        self._forget_step()
        self._resting = {at for at, rest in self._rests.items() if not rest.takes_part()}
        resting = len(self._resting) == len(self.sources)
        self._paused_steps += resting
        self._unseen = resting and self._paused_steps % _SEEN > 0
        if not self._unseen:
            self._resting = {at for at in self._resting if not self._woken(at, view, rows)}
        if len(self._resting) == len(self.sources):
            self._started = perf_counter()
            return None
        limits = [min(limit, self.num_draft_tokens) for limit in budget.nodes]
        by_source = [self._propose_all(at, view, rows, limits, rng) for at in range(len(self.sources))]
        if any(len(own.depths) > 1 for source in by_source for own in source):
            self._proposals = [list(own) for own in zip(*by_source)]
            granted = self._grant(limits)
            if any(map(any, granted)):
                trees = [
                    _join([(own.tree, count) for own, count in zip(proposals, counts)])
                    for proposals, counts in zip(self._proposals, granted)
                ]
                self._last, self._plain = Draft.trees(rows, trees, device=view.device), ()
        self._started = perf_counter()
        self._shared_cost = self._started - began - sum(self._costs)
        return self._last

    def _woken(self, at: int, view: StateView, rows: Sequence[int]) -> bool:
        """Whether a drafter that rests has a proposal that it should not keep back."""
        ends_rest = getattr(self.sources[at], "ends_rest", None)
        return ends_rest is not None and ends_rest(view, rows)

    def _propose_all(
        self, at: int, view: StateView, rows: Sequence[int], limits: Sequence[int], rng: Rng
    ) -> list[_Proposal]:
        """Proposals of one drafter, by row. Those of a drafter that rests are roots."""
        source, started = self.sources[at], perf_counter()
        if at in self._resting:
            return [_Proposal(([view.tokens(row)[-1]], [-1]), [0], (at, 0)) for row in rows]
        found = []
        for row, tree in enumerate(source.grow_trees(view, rows, limits, rng)):
            depths = [0]
            for parent in tree[1][1:]:
                depths.append(depths[parent] + 1)
            found.append(_Proposal(tree, depths, (at, source.confidence[row])))
        self._costs[at] = perf_counter() - started
        return found

    def _reached(self, own: _Proposal) -> list[float]:
        """Probabilities that 1, 2, ... tokens of a proposal are accepted."""
        source, level = own.key
        if own.key not in self._accepted:
            self._accepted[own.key] = Lengths(0.99), Lengths(0.95)
        return survival(self._accepted[own.key], max(own.depths), self.sources[source].level_rates[level])

    def _grant(self, limits: Sequence[int]) -> list[list[int]]:
        """Nodes to score of every proposal, by row: the prefix with the most expected tokens per second."""
        gains = []  # (negative gain, row, source) of each further node
        count, granted = len(limits), [[0] * len(self.sources) for _ in limits]
        for row, proposals in enumerate(self._proposals):
            missed = 1.0  # probability that no earlier source has the next token
            reached = {at: self._reached(own) for at, own in enumerate(proposals) if len(own.depths) > 1}
            for at in sorted(reached, key=lambda at: -reached[at][0]):
                gains.append(self._node_gains(row, at, proposals[at], reached[at], missed))
                missed *= 1 - reached[at][0]
        order, used = [], [0] * count
        for negative, row, at in merge(*gains):
            if used[row] < limits[row]:
                used[row] += 1
                order.append((negative, row, at))
        chosen = order[: self._most_goodput(count, [-negative for negative, _, _ in order])]
        for _, row, at in chosen:
            granted[row][at] += 1
        self._saved = self._expected_savings(count, [(-negative, at) for negative, _, at in chosen])
        return granted

    def _expected_savings(self, rows: int, chosen: Sequence[tuple[float, int]]) -> list[float]:
        """Seconds that the chosen nodes of each source are expected to save: tokens less, passes longer."""
        saved = [0.0] * len(self.sources)
        if chosen and self.pass_times.prior is not None:
            plain = self.pass_times.seconds_at(rows)
            per_node = max(self.pass_times.seconds_at(rows + len(chosen)) - plain, 0.0) / len(chosen)
            for gain, at in chosen:
                saved[at] += gain * plain / rows - per_node
        return saved

    def _most_goodput(self, rows: int, gains: Sequence[float]) -> int:
        """How many nodes have the most expected tokens per second; all of them if seconds are unknown."""
        if self.pass_times.prior is None:
            return len(gains)
        tokens, plain, keep = float(rows), max(self.pass_times.seconds_at(rows), 1e-9), 0
        best = (1 + _MARGIN) * tokens / plain
        for count, gain in enumerate(gains, start=1):
            tokens += gain
            speed = tokens / max(self.pass_times.seconds_at(rows + count), plain)
            if speed > best:
                best, keep = speed, count
        return keep

    @staticmethod
    def _node_gains(
        row: int, at: int, own: _Proposal, reached: Sequence[float], missed: float
    ) -> list[tuple[float, int, int]]:
        """Negative expected tokens of each node of a proposal, never increasing."""
        firsts = [1]  # the first node of each depth
        for node, depth in enumerate(own.depths):
            if depth > len(firsts):
                firsts.append(node)
        # nodes beside a path raise the chance of its depths, so a depth's gain is spread over its nodes
        gain, found = 1.0, []
        for chance, start, end in zip(reached, firsts, [*firsts[1:], len(own.depths)]):
            gain = min(gain, missed * chance / (end - start))
            found += [(-gain, row, at)] * (end - start)
        return found

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Learns how far each proposal was right, and lets the drafters observe the step."""
        if self._unseen:
            self._plain, self._resting, self._unseen = (), set(), False
            return
        began, active = perf_counter(), [at for at in range(len(self.sources)) if at not in self._resting]
        is_own = draft is self._last or (self._plain and self._plain == draft.host_rows())
        if is_own:
            self.pass_times.add(draft.num_nodes, began - self._started)
        if is_own and self._proposals:
            self._learn(draft, acceptance)
        shared = (self._shared_cost + perf_counter() - began) / max(len(active), 1)
        for at, source in enumerate(self.sources):
            started = perf_counter()
            if at in active or hasattr(source, "ends_rest"):
                source.observe(view, draft, acceptance, output)
            if at in active and at in self._rests and self.pass_times.prior is not None:
                cost = self._costs[at] + shared + perf_counter() - started
                self._rests[at].add(cost, self._saved[at], self.pass_times.seconds_at(draft.num_rows))
        self._last, self._plain, self._resting = None, (), set()
        self._forget_step()

    def _forget_step(self) -> None:
        """Drops proposals, costs and savings of a step, also of one that failed before it was observed."""
        self._proposals, self._shared_cost = [], 0.0
        self._costs, self._saved = [0.0] * len(self.sources), [0.0] * len(self.sources)

    def _learn(self, draft: Draft, acceptance: Acceptance) -> None:
        """Counts how far each proposal was right."""
        tokens, next_tokens = draft.tokens.tolist(), acceptance.next_token.tolist()
        paths = zip(acceptance.path.tolist(), acceptance.read_num_accepted(), next_tokens)
        for proposals, (path, count, after) in zip(self._proposals, paths):
            emitted = [*(tokens[node] for node in path[1 : count + 1]), after]
            for own in proposals:
                if len(own.depths) > 1:
                    accepted, rejected = _outcome(own, emitted)
                    for lengths in self._accepted[own.key]:
                        lengths.add(accepted, cut=not rejected)

    def release(self, rows: Sequence[int]) -> None:
        """Releases the rows in all drafters, even if one of them raises."""
        self._rows -= {*rows}
        with ExitStack() as leaving:
            for source in self.sources:
                leaving.callback(source.release, rows)
                if self._view is not None and hasattr(source, "catch_up"):
                    leaving.callback(source.catch_up, self._view, rows)  # called before `release`

    def forget(self) -> None:
        """Makes the drafters drop the data that they share between requests."""
        for source in self.sources:
            source.forget()


def _join(parts: Sequence[tuple[Tree, int]]) -> Tree:
    """Joins the first nodes of trees with one root; equal siblings share a node."""
    tokens, parents = [parts[0][0][0][0]], [-1]
    nodes: dict[tuple[int, int], int] = {}
    for (own_tokens, own_parents), count in parts:
        places = [0]
        for token, parent in zip(own_tokens[1 : count + 1], own_parents[1 : count + 1]):
            key = (places[parent], token)
            if key not in nodes:
                nodes[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
            places.append(nodes[key])
    return tokens, parents


def _outcome(own: _Proposal, emitted: Sequence[int]) -> tuple[int, bool]:
    """How far a proposal agrees with the emitted tokens, and whether it went on there with other ones."""
    tokens, parents = own.tree
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents)) if parent >= 0}
    at, accepted = 0, 0
    while accepted < len(emitted) and (at, emitted[accepted]) in children:
        at = children[at, emitted[accepted]]
        accepted += 1
    return accepted, accepted < len(emitted) and at in parents


DRAFTER: type[Drafter] = AutoDrafter

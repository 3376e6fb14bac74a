"""A small model drafts a chain of K tokens (Leviathan et al. 2023; Chen et al. 2023), over a paged cache of its own.

How a token is picked: `coupled` (arg-max under the replay noise that the target will use), `drawn` (from the draft's
law, which travels with the draft) or `greedy`. All are lossless under every lossless rule; `coupled` suits `replay`,
`drawn` suits `token`. Tests: tests/drafters/test_draft_model.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.budget import MovingThreshold, surely_accepted
from specdec_fast.draft import Draft
from specdec_fast.interfaces import (
    Acceptance,
    Budget,
    CapturedRows,
    CapturedTrees,
    Needs,
    Parts,
    Rng,
    StateView,
    TargetOutput,
)
from specdec_fast.laws import Laws, concat_laws
from specdec_fast.packed_shape import packed_shape
from specdec_fast.packing import pack
from specdec_fast.sampling import Sampling, process_chains
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.translation import GrowingText, Translation
from specdec_fast.upload import from_host
from specdec_kernels import draw_sample

PICKS = ("coupled", "drawn", "greedy")
TOKENIZERS = ("same", "tli", "slem")


class DraftModelDrafter:
    """Drafts with `model`, a target of its own whose rows mirror those of the engine.

    num_draft_tokens: K, the default budget per row; pick: "coupled", "drawn" or "greedy"; vocab_size: the target's
    (draft ids beyond it are masked); entropy_stop: a row's chain ends before a token whose law is so uncertain that the
    bound of Agrawal et al. 2024 on its acceptance (`surely_accepted`) is below this; 0 never stops; entropy_goal: the
    share of accepted tokens that each request moves its `entropy_stop` towards; 0 leaves it as it is; tokenizers:
    "same", or for a draft with another one "tli" (its law restricted to common tokens) or "slem" (its text, likeliest
    tokens first, in the target's tokens), both by way of `translation`.
    """

    name = "draft_model"
    takes_draft = draws = True
    needs = Needs(topology="chain", own_cache=True)

    def __init__(
        self,
        model: HuggingFaceTarget,
        num_draft_tokens: int = 4,
        pick: str = "coupled",
        vocab_size: int | None = None,
        entropy_stop: float = 0.0,
        entropy_goal: float = 0.0,
        tokenizers: str = "same",
        translation: Translation | None = None,
    ) -> None:
        if tokenizers not in TOKENIZERS:
            raise ValueError(
                f"draft_model tokenizers: got {tokenizers!r}; expected one of {', '.join(TOKENIZERS)}: the last two "
                "are for a draft whose tokenizer is not the target's"
            )
        if (tokenizers == "same") != (translation is None):
            raise ValueError(
                f"draft_model tokenizers: got {tokenizers!r} {'with' if translation else 'without'} a translation; "
                "expected one for tli and slem; load() and the command line make it from the models' tokenizers"
            )
        if not 0 <= entropy_stop < 1:
            raise ValueError(f"draft_model entropy_stop: got {entropy_stop}; expected a number in [0, 1); 0 is off")
        if not 0 <= entropy_goal <= 1 or (entropy_goal and not entropy_stop):
            raise ValueError(
                f"draft_model entropy_goal: got {entropy_goal} with entropy_stop {entropy_stop}; expected a number in "
                "[0, 1], and above 0 (off) with an entropy_stop to begin with"
            )
        if num_draft_tokens < 1:
            raise ValueError(f"draft_model num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        if pick not in PICKS:
            raise ValueError(f"draft_model pick: got {pick!r}; expected one of {', '.join(PICKS)}")
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self.pick = pick
        self.entropy_stop, self.entropy_goal = entropy_stop, float(entropy_goal)
        self.tokenizers, self._translation = tokenizers, translation
        self._vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        if translation is not None:
            self._vocab_size = model.vocab_size
        laws, ids = pick == "drawn" and tokenizers != "slem", self._vocab_size if translation is None else None
        self.needs = Needs(topology="chain", own_cache=True, laws=laws, vocab_size=ids)
        self._stored: dict[int, tuple[int, list[int]]] = {}  # per row: committed tokens held, drafted tokens held
        self._fed: dict[int, list[int]] = {}  # per row, with a translation: the draft's tokens that are held
        self._texts: dict[int, GrowingText] = {}  # and its text in these
        self._thresholds: dict[int, MovingThreshold] = {}  # per row, with a goal
        self._last: tuple[Draft | None, tuple[int, ...]] = (None, ())  # with the budget of each of its rows

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"pick": prefers}

    @classmethod
    def from_parts(cls, parts: Parts, **options: Any) -> DraftModelDrafter:
        """Over the draft model that was given, picking tokens as the rule prefers."""
        assert parts.draft is not None
        model: Any = parts.draft()
        translation = None
        if options.get("tokenizers", "same") != "same":
            theirs = getattr(model, "tokenizer", None)
            sizes = parts.target.vocab_size, model.vocab_size
            translation = Translation(parts.tokenizer, theirs, *sizes, device=model.device)
        defaults = {"vocab_size": parts.target.vocab_size, "translation": translation}
        return cls(model, **{**cls.by_rule(parts.prefers), **defaults, **options})

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        room = self.model.cache.max_rows
        if max(rows) >= room:
            raise ValueError(
                f"draft_model: got row {max(rows)} of the engine and a draft with room for {room} rows; expected at "
                "least as many as the target has; build the draft with the target's max_rows"
            )
        for row in rows:
            self._stored[row], self._fed[row] = (0, []), []
            if self._translation is not None:
                self._texts[row] = GrowingText(self._translation)
            if self.entropy_goal:
                self._thresholds[row] = MovingThreshold(self.entropy_stop, self.entropy_goal)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        tokens = [view.tokens(row) for row in rows]
        held = tokens
        if self._translation is not None:
            each = zip(rows, budget.nodes, tokens)
            held = [self._texts[row].to_draft(have) if limit > 0 else have for row, limit, have in each]
        counts = [
            limit if limit > 0 and self._room(row, len(have) + limit) else 0
            for row, limit, have in zip(rows, budget.nodes, held)
        ]
        active = [index for index, count in enumerate(counts) if count]
        if not active:
            return Draft.chains(rows, [[have[-1]] for have in tokens], device=view.device)
        logits = self._catch_up([rows[index] for index in active], [held[index] for index in active])
        levels: list[tuple[list[int], Tensor]] = []
        parts: list[Laws] = []
        sampling, roots = view.sampling([rows[index] for index in active]), rng.positions
        if len(active) < len(rows):
            roots = roots[active]
        shape = positions = None  # of the active rows: a pass over one token of each, and where tokens will stand
        for level in range(max(counts)):
            if self.entropy_stop:  # before the token is drawn: a token that was drawn is never dropped
                sure = surely_accepted(logits, sampling.temperature).tolist()
                going = [at for at, bound in enumerate(sure) if bound >= self._least(rows[active[at]], level)]
                if len(going) < len(active):
                    if not going:
                        break
                    logits, roots = logits[going], roots[going]
                    active, shape, positions = [active[at] for at in going], None, None
                    sampling = view.sampling([rows[index] for index in active])
            if positions is None:
                positions = self._positions(sampling, roots, max(counts))
            where = roots, positions[level], rng.first_draw
            chosen, laws = self._pick_level(view, rows, sampling, where, logits, levels, active)
            levels.append((active, chosen))
            if laws is not None:
                parts.append(laws)
            going = [at for at, index in enumerate(active) if counts[index] > level + 1]
            if not going:
                break
            if len(going) < len(active):
                chosen, roots = chosen[going], roots[going]
                active, shape, positions = [active[at] for at in going], None, None
                sampling = view.sampling([rows[index] for index in active])
            if shape is None:
                shape = packed_shape(tuple([rows[index] for index in active]), (1,) * len(active), view.device)
            fed = self._translation.ids(chosen) if self.tokenizers == "tli" and self._translation else chosen
            logits = self._masked(self.model.extend(shape.rows, fed, shape.offsets, logits=shape.last).logits)
        draft = self._pack(view, rows, tokens, held, levels, parts)
        self._last = draft, tuple(budget.nodes)
        return draft

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Moves thresholds; what was accepted the next propose sees by comparing its tokens with the committed ones."""
        last, limits = self._last
        if not self.entropy_goal or draft is not last:
            return
        taken = acceptance.host_accepted()
        for row, count, limit, accepted in zip(draft.host_rows(), draft.counts, limits, taken):
            if count > 1 and row in self._thresholds:
                self._thresholds[row].update(accepted, count - 1, full=accepted == limit)

    def release(self, rows: Sequence[int]) -> None:
        self.model.cache.release([row for row in rows if self._stored.pop(row, None) is not None])
        for row in rows:
            self._fed.pop(row, None)
            self._texts.pop(row, None)
            self._thresholds.pop(row, None)

    def captured(self, max_rows: int) -> CapturedChains | str:
        """Its proposals for captured steps over an engine of max_rows rows, or why there are none."""
        if self._translation is not None:
            return "a draft with another tokenizer translates its tokens on the host"
        if self.entropy_stop:
            return "entropy_stop decides on the host how long a draft is"
        if self.pick == "drawn":
            return "tokens that are drawn carry laws (pick=coupled or greedy has none)"
        if self.model.cache.max_rows < max_rows:
            return f"the draft has room for {self.model.cache.max_rows} rows, the target for {max_rows}"
        return CapturedChains(self)

    def _least(self, row: int, level: int) -> float:
        """The bound below which a row's chain ends. Its first token costs no pass of its own, so a threshold that moves
        lets it through: one that has risen too far would hear of nothing any more.
        """
        if not self.entropy_goal:
            return self.entropy_stop
        return self._thresholds[row].threshold if level else float("-inf")

    def _room(self, row: int, length: int) -> bool:
        cache = self.model.cache
        return length <= self.model.max_length and cache.reserve(row, length)

    def _masked(self, logits: Tensor | None) -> Tensor:
        assert logits is not None
        if self.tokenizers == "tli" and self._translation is not None:
            return self._translation.law(logits)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    def _catch_up(self, rows: list[int], tokens: list[Sequence[int]]) -> Tensor:
        """Drop what was not accepted, feed what is new; logits [B, V] after the root."""
        kept: list[int] = []
        fed: list[int] = []
        counts: list[int] = []
        for row, have in zip(rows, tokens):
            start, drafted = self._stored[row]
            for token in drafted:  # drafted tokens that were accepted are already stored
                if start >= len(have) or have[start] != token:
                    break
                start += 1
            if self._translation is not None:
                start = _common(self._fed[row], have)
            start = min(start, len(have) - 1)  # the root is always fed: its logits are wanted
            kept.append(start)
            # a target's padding ids may lie beyond the draft's embedding: what stands in for them only costs acceptance
            fed.extend(token if token < self.model.vocab_size else 0 for token in have[start:])
            counts.append(len(have) - start)
        device = self.model.device
        shape = packed_shape(tuple(rows), tuple(counts), device)
        self.model.cache.rollback(rows, kept)
        output = self.model.extend(shape.rows, from_host(fed, torch.int64, device), shape.offsets, logits=shape.last)
        for row, have in zip(rows, tokens):
            self._stored[row] = (len(have), [])
            if self._translation is not None:
                self._fed[row] = list(have)
        return self._masked(output.logits)

    def _positions(self, sampling: Sampling, roots: Tensor, depth: int) -> Sequence[Tensor]:
        """By level, the positions of the tokens to pick, int32 [B]: made at once, an addition a level takes longer."""
        if self.pick != "coupled" or sampling.all_greedy:  # nobody looks at them
            return (roots,) * depth
        return (roots + from_host(range(1, depth + 1), torch.int32, roots.device)[:, None]).unbind()

    def _pick_level(
        self,
        view: StateView,
        rows: Sequence[int],
        sampling: Sampling,
        where: tuple[Tensor, Tensor, int],
        logits: Tensor,
        levels: list[tuple[list[int], Tensor]],
        active: list[int],
    ) -> tuple[Tensor, Laws | None]:
        """Tokens of the rows that are `active`. where: positions of their roots and of these tokens, the first draw."""
        roots, positions, first_draw = where
        if self.tokenizers == "slem":
            return logits.argmax(1), None
        if sampling.edits is not None:  # q with the target's edits, each row after its own chain
            drafted = [dict(zip(earlier, chosen.tolist())) for earlier, chosen in levels]
            chains = [[view.tokens(rows[at])[-1], *(tokens[at] for tokens in drafted)] for at in active]
            laws = process_chains(logits, sampling, roots, chains)
            logits = laws.logits
        elif self.pick == "drawn":
            laws = sampling.laws(logits)
        if self.pick == "greedy":
            return logits.argmax(1), None
        if self.pick == "coupled":
            return sampling.choose(logits, positions), None
        index = torch.full_like(roots, first_draw + len(levels))
        return draw_sample(laws.logits, *laws.stats, sampling.seeds, roots, index, mass=laws.mass), laws

    def _pack(
        self,
        view: StateView,
        rows: Sequence[int],
        tokens: list[Sequence[int]],
        held: list[Sequence[int]],
        levels: list[tuple[list[int], Tensor]],
        parts: list[Laws],
    ) -> Draft:
        """Interleave the levels into packed chains."""
        drafted: list[list[int]] = [[] for _ in rows]
        law_rows: list[list[int]] = [[] for _ in rows]
        used = 0
        for active, chosen in levels:
            for at, (index, token) in enumerate(zip(active, chosen.tolist())):
                drafted[index].append(token)
                law_rows[index].append(used + at)
            used += len(active)
        for index, row in enumerate(rows):
            if drafted[index]:
                self._stored[row] = (len(held[index]), drafted[index][:-1])  # the last one was not fed
                if self._translation is not None:
                    drafted[index] = self._translated(row, tokens[index], held[index], drafted[index])
        drawn = self.pick == "drawn" and bool(parts)
        return Draft.chains(
            rows,
            [[have[-1], *more] for have, more in zip(tokens, drafted)],
            law_rows=law_rows if drawn else None,
            laws=concat_laws(parts) if drawn else None,
            device=view.device,
        )

    def _translated(self, row: int, tokens: Sequence[int], held: Sequence[int], drafted: list[int]) -> list[int]:
        """The drafted tokens as the target's; remembers what the draft was fed."""
        assert self._translation is not None
        if self.tokenizers == "slem":
            self._fed[row] = [*held, *drafted[:-1]]
            return self._translation.to_target(tokens, held, drafted)[: len(drafted)]
        self._fed[row] = [*held, *self._translation.ids(torch.tensor(drafted[:-1], dtype=torch.int64)).tolist()]
        return drafted


class CapturedChains:
    """Chains of a draft model in captured steps: K passes over its cache, whose lengths on the device say what is held.

    The first pass feeds one or two committed tokens a row: the root, and before it the last drafted one where all were
    accepted.
    """

    taps = ()

    def __init__(self, drafter: DraftModelDrafter) -> None:
        self._drafter, self._model = drafter, drafter.model

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        tokens = [view.tokens(row) for row in rows]
        if rows:
            self._drafter._catch_up(list(rows), tokens)

    def reserve(self, row: int, length: int) -> bool:
        return self._drafter._room(row, length)

    def propose(self, batch: CapturedRows) -> CapturedTrees:
        cache, index = self._model.cache, batch.rows.long()
        held = torch.minimum(cache.lengths[index], batch.lengths - 1).clamp(min=0)
        cache.rollback(batch.rows, held)
        drafting = batch.drafts > 0
        packing = pack(torch.where(drafting, (batch.lengths - held).clamp(max=2), 0), 2)
        at = (held[packing.row_of] + packing.place).clamp(0, batch.tokens.shape[1] - 1)
        fed = batch.tokens[index[packing.row_of], at.long()]
        chosen: list[Tensor] = []
        for level in range(batch.num_draft_tokens):
            if level:
                packing = pack((batch.drafts > level).to(torch.int32), 1)
                fed = chosen[-1][packing.row_of]
            known = packing.inside & (fed < self._model.vocab_size)
            scored = self._model.extend(batch.rows, torch.where(known, fed, 0), packing.offsets, logits=packing.last)
            logits = self._drafter._masked(scored.logits)
            greedy = self._drafter.pick == "greedy"
            chosen.append(logits.argmax(1) if greedy else batch.sampling.choose(logits, batch.lengths + level))
        return CapturedTrees(torch.stack(chosen, 1), None, batch.drafts, len(chosen))

    def observe(self, batch: CapturedRows, acceptance: Acceptance, output: TargetOutput) -> None:
        cache, known = self._model.cache, batch.lengths + acceptance.num_accepted
        cache.rollback(batch.rows, torch.minimum(cache.lengths[batch.rows.long()], known))

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self._drafter._stored:  # beyond the text is what a step that failed has drafted
                self._drafter._stored[row] = min(int(self._model.cache.lengths[row]), view.length(row)), []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning, by halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


DRAFTER = DraftModelDrafter

"""A small model drafts a chain of K tokens (Leviathan et al. 2023; Chen et al. 2023), over a paged cache of its own.

How a token is picked: `coupled` (arg-max under the replay noise that the target will use), `drawn` (from the draft's
distribution, which travels with the draft) or `greedy`. All are lossless under every lossless rule; `coupled` suits
`replay`, `drawn` suits `token`. Tests: tests/drafters/test_draft_model.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.adaptive.budget import MovingThreshold, surely_accepted
from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.device_transfer import host_to_device, select_entries
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft
from specdec_fast.core.names import RENAMED_PICKS
from specdec_fast.draft_runners.cross_vocab import CrossVocab, GrowingText
from specdec_fast.draft_runners.cuda_graph_chains import CudaGraphChains
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.sampling.target_distributions import chain_distributions
from specdec_fast.targets.fused_forward import FusedForward
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_kernels import draft_sample
from specdec_kernels.names import unknown_name

PICKS = ("coupled", "sampled", "greedy")
TOKENIZERS = ("same", "tli", "slem")


class DraftModelDrafter:
    """Drafts with `model`, a target of its own whose rows mirror those of the engine.

    num_draft_tokens: K, the default budget per row; pick: "coupled", "sampled" or "greedy"; vocab_size: the target's
    (draft ids beyond it are masked); entropy_stop: a row's chain ends before a token whose distribution is so
    uncertain that the bound of Agrawal et al. 2024 on its acceptance (`surely_accepted`) is below this; 0 never
    stops; entropy_goal: the share of accepted tokens that each request moves its `entropy_stop` towards; 0 leaves it
    as it is; tokenizers: "same", or for a draft with another one "tli" (its distribution restricted to common tokens)
    or "slem" (its text, likeliest tokens first, in the target's tokens), both by way of `translation`.
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
        translation: CrossVocab | None = None,
    ) -> None:
        if tokenizers not in TOKENIZERS:
            or_else = ": the last two are for a draft whose tokenizer is not the target's"
            raise ValueError(unknown_name("draft_model tokenizers", tokenizers, TOKENIZERS, or_else=or_else))
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
            raise ValueError(unknown_name("draft_model pick", pick, PICKS, renamed=RENAMED_PICKS))
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self.pick = pick
        self.entropy_stop, self.entropy_goal = entropy_stop, float(entropy_goal)
        self.tokenizers, self._translation = tokenizers, translation
        self._vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        if translation is not None:
            self._vocab_size = model.vocab_size
        dists, ids = pick == "sampled" and tokenizers != "slem", self._vocab_size if translation is None else None
        self.needs = Needs(topology="chain", own_cache=True, dists=dists, vocab_size=ids)
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
    def from_parts(cls, parts: DrafterParts, **options: Any) -> DraftModelDrafter:
        """Over the draft model that was given, picking tokens as the rule prefers."""
        assert parts.draft is not None
        model: Any = parts.draft()
        translation = None
        if options.get("tokenizers", "same") != "same":
            theirs = getattr(model, "tokenizer", None)
            sizes = parts.target.vocab_size, model.vocab_size
            translation = CrossVocab(parts.tokenizer, theirs, *sizes, device=model.device)
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
        drafted: list[list[int]] = [[] for _ in rows]
        dist_rows: list[list[int]] = [[] for _ in rows]  # of each drafted token, where it was drawn
        dists = self._draft(view, rows, active, held, counts, rng, drafted, dist_rows)
        for index, row in enumerate(rows):
            if drafted[index]:
                self._stored[row] = (len(held[index]), drafted[index][:-1])  # the last one was not fed
                if self._translation is not None:
                    drafted[index] = self._translated(row, tokens[index], held[index], drafted[index])
        draft = Draft.chains(
            rows,
            [[have[-1], *more] for have, more in zip(tokens, drafted)],
            dist_rows=None if dists is None else dist_rows,
            dists=dists,
            device=view.device,
        )
        self._last = draft, tuple(budget.nodes)
        return draft

    def _draft(
        self,
        view: StateView,
        rows: Sequence[int],
        active: list[int],
        held: list[Sequence[int]],
        counts: list[int],
        rng: Rng,
        drafted: list[list[int]],
        dist_rows: list[list[int]],
    ) -> TokenDistributions | None:
        """Drafts for the rows that are `active`, in place; what drawn tokens were drawn from."""
        own, texts = [rows[index] for index in active], [held[index] for index in active]
        sampling, roots = (
            view.sampling(own),
            rng.positions if len(own) == len(rows) else select_entries(rng.positions, active),
        )
        whole = self._between_nothing()
        if whole is not None and sampling.logits_processors is None:
            return self._chain(whole, active, own, texts, counts, sampling, roots, rng.first_draw, drafted, dist_rows)
        logits, parts = self._catch_up(own, texts), []
        levels: list[tuple[list[int], Tensor]] = []  # read at the end: until then a device need not be waited for
        shape = positions = None  # of the active rows: a pass over one token of each, and where tokens will stand
        for level in range(max(counts)):
            if self.entropy_stop:  # before the token is drawn: a token that was drawn is never dropped
                sure = surely_accepted(logits, sampling.temperature).tolist()
                going = [at for at, bound in enumerate(sure) if bound >= self._least(rows[active[at]], level)]
                if len(going) < len(active):
                    if not going:
                        break
                    logits, roots = select_entries(logits, going), select_entries(roots, going)
                    active, shape, positions = [active[at] for at in going], None, None
                    sampling = view.sampling([rows[index] for index in active])
            if positions is None:
                positions = self._positions(sampling, roots, max(counts))
            chains = []
            if sampling.logits_processors is not None:
                known = [dict(zip(earlier, chosen.tolist())) for earlier, chosen in levels]
                chains = [[view.tokens(rows[at])[-1], *(tokens[at] for tokens in known)] for at in active]
            chosen, dist = self._pick_level(sampling, roots, positions[level], rng.first_draw + level, logits, chains)
            levels.append((active, chosen))
            if dist is not None:
                parts.append(dist)
            going = [at for at, index in enumerate(active) if counts[index] > level + 1]
            if not going:
                break
            if len(going) < len(active):
                chosen, roots = select_entries(chosen, going), select_entries(roots, going)
                active, shape, positions = [active[at] for at in going], None, None
                sampling = view.sampling([rows[index] for index in active])
            if shape is None:
                shape = chain_layout(tuple([rows[index] for index in active]), (1,) * len(active), view.device)
            fed = self._translation.ids(chosen) if self.tokenizers == "tli" and self._translation else chosen
            logits = self._masked(self.model.extend(shape.rows, fed, shape.offsets, logits=shape.last).logits)
        used = 0
        for active, chosen in levels:
            for at, (index, token) in enumerate(zip(active, chosen.tolist())):
                drafted[index].append(token)
                dist_rows[index].append(used + at)
            used += len(active)
        return concat_distributions(parts) if parts and self.pick == "sampled" else None

    def _between_nothing(self) -> FusedForward | None:
        """Its passes as one operator, where nothing but picks comes between those of a chain."""
        if self.entropy_stop or self._translation is not None or not isinstance(self.model, HuggingFaceTarget):
            return None
        return self.model.whole

    def _chain(
        self,
        whole: FusedForward,
        active: list[int],
        rows: list[int],
        texts: list[Sequence[int]],
        counts: list[int],
        sampling: SamplingTensors,
        roots: Tensor,
        first_draw: int,
        drafted: list[list[int]],
        dist_rows: list[list[int]],
    ) -> TokenDistributions | None:
        """The same in one call. rows, texts: of the active ones."""
        shape, fed = self._behind(rows, texts)
        temperature = None if self.pick == "greedy" else sampling.temperature
        asked = temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seeds, roots
        draw, own = first_draw if self.pick == "sampled" else None, [counts[index] for index in active]
        found = whole.chain(shape.rows, fed, shape.offsets, own, *asked, self._vocab_size, draw)
        self._held(rows, texts)
        chosen, dist = (found, ()) if isinstance(found, Tensor) else (found[0], found[1:])
        for index, count, tokens in zip(active, own, chosen.tolist()):
            drafted[index] = tokens[:count]
        if not dist:
            return None
        used = 0
        for level in range(max(own)):
            for index in active:
                if counts[index] > level:
                    dist_rows[index].append(used)
                    used += 1
        logits, inv_t, lse, cut, tie_id, mass = dist
        return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Moves thresholds; what was accepted the next propose sees by comparing its tokens with the committed ones."""
        last, limits = self._last
        if not self.entropy_goal or draft is not last:
            return
        taken = acceptance.read_num_accepted()
        for row, count, limit, accepted in zip(draft.host_rows(), draft.counts, limits, taken):
            if count > 1 and row in self._thresholds:
                self._thresholds[row].update(accepted, count - 1, full=accepted == limit)

    def release(self, rows: Sequence[int]) -> None:
        self.model.cache.release([row for row in rows if self._stored.pop(row, None) is not None])
        for row in rows:
            self._fed.pop(row, None)
            self._texts.pop(row, None)
            self._thresholds.pop(row, None)

    def cuda_graph_proposals(self, max_rows: int) -> CudaGraphChains | str:
        """Its proposals for captured steps over an engine of max_rows rows, or why there are none."""
        if self._translation is not None:
            return "a draft with another tokenizer translates its tokens on the host"
        if self.entropy_stop:
            return "entropy_stop decides on the host how long a draft is"
        if self.pick == "sampled":
            return "tokens that are drawn carry distributions (pick=coupled or greedy has none)"
        if self.model.cache.max_rows < max_rows:
            return f"the draft has room for {self.model.cache.max_rows} rows, the target for {max_rows}"
        return CudaGraphChains(
            self.model, self.pick == "greedy", self._masked, self._catch_up, self._room, self._settle
        )

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
            return self._translation.dist(logits)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    def _catch_up(self, rows: list[int], tokens: list[Sequence[int]]) -> Tensor:
        """Drop what was not accepted, feed what is new; logits [B, V] after the root."""
        shape, fed = self._behind(rows, tokens)
        output = self.model.extend(shape.rows, fed, shape.offsets, logits=shape.last)
        self._held(rows, tokens)
        return self._masked(output.logits)

    def _behind(self, rows: list[int], tokens: list[Sequence[int]]) -> tuple[ChainLayout, Tensor]:
        """What the draft has to be fed, with what was not accepted dropped."""
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
            self._stored[row] = start, []  # whatever breaks off what follows
            kept.append(start)
            # a target's padding ids may lie beyond the draft's embedding: what stands in for them only costs acceptance
            fed.extend(token if token < self.model.vocab_size else 0 for token in have[start:])
            counts.append(len(have) - start)
        device = self.model.device
        self.model.cache.rollback(rows, kept)
        return chain_layout(tuple(rows), tuple(counts), device), host_to_device(fed, torch.int64, device)

    def _held(self, rows: list[int], tokens: list[Sequence[int]]) -> None:
        """These tokens are stored now."""
        for row, have in zip(rows, tokens):
            self._stored[row] = (len(have), [])
            if self._translation is not None:
                self._fed[row] = list(have)

    def _settle(self, row: int, length: int) -> None:
        """A row has left captured steps, in which it came to hold `length` tokens of its text."""
        if row in self._stored:
            self._stored[row] = length, []

    def _positions(self, sampling: SamplingTensors, roots: Tensor, depth: int) -> Sequence[Tensor]:
        """By level, the positions of the tokens to pick, int32 [B]: made at once, an addition a level takes longer."""
        if self.pick != "coupled" or sampling.all_greedy:  # nobody looks at them
            return (roots,) * depth
        return (roots + host_to_device(range(1, depth + 1), torch.int32, roots.device)[:, None]).unbind()

    def _pick_level(
        self,
        sampling: SamplingTensors,
        roots: Tensor,
        positions: Tensor,
        draw: int,
        logits: Tensor,
        chains: list[list[int]],
    ) -> tuple[Tensor, TokenDistributions | None]:
        """Tokens of the rows that are active. positions: where they will stand; draw: number of this level's draw;
        chains: root and drafted tokens so far, where there are edits.
        """
        if self.tokenizers == "slem":
            return logits.argmax(1), None
        if sampling.logits_processors is not None:  # q with the target's edits, each row after its own chain
            dists = chain_distributions(logits, sampling, roots, chains)
            logits = dists.logits
        elif self.pick == "sampled":
            dists = sampling.distributions(logits)
        if self.pick == "greedy":
            return logits.argmax(1), None
        if self.pick == "coupled":
            return sampling.sample_replay(logits, positions), None
        index = torch.full_like(roots, draw)
        return draft_sample(dists.logits, *dists.stats, sampling.seeds, roots, index, mass=dists.mass), dists

    def _translated(self, row: int, tokens: Sequence[int], held: Sequence[int], drafted: list[int]) -> list[int]:
        """The drafted tokens as the target's; remembers what the draft was fed."""
        assert self._translation is not None
        if self.tokenizers == "slem":
            self._fed[row] = [*held, *drafted[:-1]]
            return self._translation.to_target(tokens, held, drafted)[: len(drafted)]
        fed = host_to_device(drafted[:-1], torch.int64, self.model.device)
        self._fed[row] = [*held, *self._translation.ids(fed).tolist()]
        return drafted


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning, by halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


DRAFTER = DraftModelDrafter

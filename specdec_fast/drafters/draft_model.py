"""A small draft model drafts a chain of K tokens, over a paged cache of its own.

Tokens are picked in one of three ways. `coupled` is the arg-max under the replay noise of the target; it suits rule
`replay`. `sampled` samples the draft's distribution, which accompanies the draft; it suits `rejection` and `block`.
`greedy` is the arg-max. All are lossless under every lossless rule. Tests: tests/drafters/test_draft_model.py and the
contract suite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.adaptive.budget import MovingThreshold, acceptance_lower_bound
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device, select_entries
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft
from specdec_fast.core.finite_logits import not_finite_message, require_finite_logits
from specdec_fast.core.proposal_kind import check_pick
from specdec_fast.draft_runners.cross_vocab import CrossVocab
from specdec_fast.draft_runners.cuda_graph_chains import CudaGraphChains
from specdec_fast.draft_runners.draft_chain_runner import DraftChainRunner
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.sampling.target_distributions import chain_distributions
from specdec_fast.targets.fused_forward import FusedForward
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_kernels import draft_sample
from specdec_kernels.unknown_names import unknown_name

TOKENIZERS = ("same", "tli", "slem")


class DraftModelDrafter:
    """Drafts chains with a small model.

    Args:
        model: The draft model, a target of its own. Its rows follow those of the engine.
        num_draft_tokens: Default budget K per row.
        pick: "coupled", "sampled" or "greedy".
        vocab_size: Vocabulary of the target; draft ids beyond it are masked. None: the draft model's.
        entropy_stop: A chain ends before a token whose distribution is too uncertain: the bound of Agrawal et al. 2024
            on its acceptance (`acceptance_lower_bound`) is below this number. 0 never stops.
        entropy_goal: Share of accepted tokens towards which each request adapts its `entropy_stop`. 0 keeps it
            constant.
        tokenizers: "same" for a draft model with the target's tokenizer. "tli" restricts the draft's distribution to
            common tokens. "slem" re-encodes the draft's text in the target's tokens, and picks the likeliest tokens.
        translation: Translation between the vocabularies, for "tli" and "slem". `load` builds it.

    Raises:
        ValueError: If an option is out of range or two options contradict each other.

    Source:
        Leviathan et al. 2023; Chen et al. 2023. Agrawal et al. 2024 (AdaEDL) for `entropy_stop`; Timor et al. 2025 for
        other tokenizers.
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
            or_else = ": the last two are for a draft with another tokenizer"
            raise ValueError(unknown_name("draft_model tokenizers", tokenizers, TOKENIZERS, or_else=or_else))
        if (tokenizers == "same") != (translation is None):
            raise ValueError(
                f"draft_model tokenizers: got {tokenizers!r} {'with' if translation else 'without'} a translation; "
                "expected one for tli and slem; load() and the command line build it from the models' tokenizers"
            )
        if not 0 <= entropy_stop < 1:
            raise ValueError(f"draft_model entropy_stop: got {entropy_stop}; expected a number in [0, 1); 0 is off")
        if not 0 <= entropy_goal <= 1 or (entropy_goal and not entropy_stop):
            raise ValueError(
                f"draft_model entropy_goal: got {entropy_goal} with entropy_stop {entropy_stop}; expected a number in "
                "[0, 1], and above 0 (off) only with an entropy_stop"
            )
        if num_draft_tokens < 1:
            raise ValueError(f"draft_model num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        check_pick("draft_model", pick)
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self.pick = pick
        self.entropy_stop, self.entropy_goal = entropy_stop, float(entropy_goal)
        self.tokenizers = tokenizers
        size = model.vocab_size if translation is not None else min(vocab_size or model.vocab_size, model.vocab_size)
        self._runner = DraftChainRunner(model, size, tokenizers, translation)
        dists, ids = pick == "sampled" and tokenizers != "slem", size if translation is None else None
        self.needs = Needs(topology="chain", own_cache=True, dists=dists, vocab_size=ids)
        self._thresholds: dict[int, MovingThreshold] = {}  # per row, with a goal
        self._last: tuple[Draft | None, tuple[int, ...]] = (None, ())  # the last draft, and the budgets of its rows

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> DraftModelDrafter:
        """Builds a drafter over the caller's draft model that picks tokens as the rule prefers."""
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
        """Starts the draft model's cache rows and the rows' moving thresholds."""
        self._runner.begin(view, rows)
        for row in rows:
            if self.entropy_goal:
                self._thresholds[row] = MovingThreshold(self.entropy_stop, self.entropy_goal)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Runs the draft model once per level, and ends a chain at its budget or its threshold."""
        tokens = [view.tokens(row) for row in rows]
        each = zip(rows, budget.nodes, tokens)
        texts = [self._runner.to_draft(row, text) if limit > 0 else text for row, limit, text in each]
        counts = [
            limit if limit > 0 and self._runner.reserve(row, len(text) + limit) else 0
            for row, limit, text in zip(rows, budget.nodes, texts)
        ]
        active = [index for index, count in enumerate(counts) if count]
        if not active:
            return Draft.chains(rows, [[text[-1]] for text in tokens], device=view.device)
        drafted: list[list[int]] = [[] for _ in rows]
        dist_rows: list[list[int]] = [[] for _ in rows]  # of each drafted token, the row of its distribution
        dists = self._draft_levels(view, rows, active, texts, counts, rng, drafted, dist_rows)
        for index, row in enumerate(rows):
            if drafted[index]:
                self._runner.mark_drafted(row, texts[index], drafted[index])
                drafted[index] = self._runner.to_target(row, tokens[index], texts[index], drafted[index])
        draft = Draft.chains(
            rows,
            [[text[-1], *more] for text, more in zip(tokens, drafted)],
            dist_rows=None if dists is None else dist_rows,
            dists=dists,
            device=view.device,
        )
        self._last = draft, tuple(budget.nodes)
        return draft

    def _draft_levels(
        self,
        view: StateView,
        rows: Sequence[int],
        active: list[int],
        texts: list[Sequence[int]],
        counts: list[int],
        rng: Rng,
        drafted: list[list[int]],
        dist_rows: list[list[int]],
    ) -> TokenDistributions | None:
        """Drafts for the active rows, in place; returns the distributions of sampled tokens."""
        own, own_texts = [rows[index] for index in active], [texts[index] for index in active]
        sampling, roots = (
            view.sampling(own),
            rng.positions if len(own) == len(rows) else select_entries(rng.positions, active),
        )
        fused = self._fused_chain_forward()
        if fused is not None and sampling.logits_processors is None:
            arguments = own, own_texts, counts, sampling, roots, rng.first_draw
            return self._draft_fused(fused, active, *arguments, drafted, dist_rows)
        logits, parts = self._runner.catch_up(own, own_texts), []
        levels: list[tuple[list[int], Tensor]] = []  # read at the end, so that nothing waits for the device before
        shape = positions = None  # of the active rows: layout of one token each, and positions by level
        for level in range(max(counts)):
            if self.entropy_stop:  # before the token is sampled: a sampled token is never dropped
                bounds = acceptance_lower_bound(logits, sampling.temperature).tolist()
                going = [
                    at for at, bound in enumerate(bounds) if bound >= self._stop_threshold(rows[active[at]], level)
                ]
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
                known = [dict(zip(earlier, picked.tolist())) for earlier, picked in levels]
                chains = [[view.tokens(rows[at])[-1], *(tokens[at] for tokens in known)] for at in active]
            picked, dist = self._pick_level(sampling, roots, positions[level], rng.first_draw + level, logits, chains)
            levels.append((active, picked))
            if dist is not None:
                parts.append(dist)
            going = [at for at, index in enumerate(active) if counts[index] > level + 1]
            if not going:
                break
            if len(going) < len(active):
                picked, roots = select_entries(picked, going), select_entries(roots, going)
                active, shape, positions = [active[at] for at in going], None, None
                sampling = view.sampling([rows[index] for index in active])
            if shape is None:
                shape = chain_layout(tuple([rows[index] for index in active]), (1,) * len(active), view.device)
            fed = self._runner.draft_ids(picked)
            logits = self._runner.mask_logits(
                self.model.extend(shape.rows, fed, shape.offsets, logits=shape.last).logits
            )
        used = 0
        for active, picked in levels:
            for at, (index, token) in enumerate(zip(active, picked.tolist())):
                drafted[index].append(token)
                dist_rows[index].append(used + at)
            used += len(active)
        return _check_distributions(concat_distributions(parts)) if parts and self.pick == "sampled" else None

    def _fused_chain_forward(self) -> FusedForward | None:
        """The fused forward, if nothing but picking a token happens between the passes of a chain."""
        if self.entropy_stop or self.tokenizers != "same" or not isinstance(self.model, HuggingFaceTarget):
            return None
        fused = self.model.fused_forward
        return None if fused is None or fused.run_chain is None else fused

    def _draft_fused(
        self,
        fused: FusedForward,
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
        """Drafts whole chains in one operator call. rows, texts: of the active rows."""
        shape, fed = self._runner.missing_tokens(rows, texts)
        temperature = None if self.pick == "greedy" else sampling.temperature
        params = temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seeds, roots
        draw, own = first_draw if self.pick == "sampled" else None, [counts[index] for index in active]
        found = fused.chain(shape.rows, fed, shape.offsets, own, *params, self._runner.vocab_size, draw)
        self._runner.mark_stored(rows, texts)
        picked, dist = (found, ()) if isinstance(found, Tensor) else (found[0], found[1:])
        for index, count, tokens in zip(active, own, picked.tolist()):
            drafted[index] = tokens[:count]
            if -1 in drafted[index]:
                raise ValueError(not_finite_message("draft_model", self.model.dtype))
        if not dist:
            return None
        used = 0
        for level in range(max(own)):
            for index in active:
                if counts[index] > level:
                    dist_rows[index].append(used)
                    used += 1
        logits, inv_t, lse, cut, tie_id, mass = dist
        return _check_distributions(TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass))

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Adapts thresholds. `propose` finds accepted tokens by comparing its own with the committed ones."""
        last, limits = self._last
        if not self.entropy_goal or draft is not last:
            return
        num_accepted = acceptance.read_num_accepted()
        for row, count, limit, accepted in zip(draft.host_rows(), draft.counts, limits, num_accepted):
            if count > 1 and row in self._thresholds:
                self._thresholds[row].update(accepted, count - 1, full=accepted == limit)

    def release(self, rows: Sequence[int]) -> None:
        """Frees the draft model's pages of these rows."""
        self._runner.release(rows)
        for row in rows:
            self._thresholds.pop(row, None)

    def cuda_graph_proposals(self, max_rows: int) -> CudaGraphChains | str:
        """Returns the proposals for CUDA-graph steps of an engine with `max_rows` rows, or why there are none."""
        if self.tokenizers != "same":
            return "a draft with another tokenizer translates its tokens on the host"
        if self.entropy_stop:
            return "entropy_stop decides on the host how long a draft is"
        if self.pick == "sampled":
            return "sampled tokens carry distributions (pick=coupled or greedy has none)"
        if self.model.cache.why_no_rollback is not None:
            return "a draft with recurrent layers goes back by records that the host keeps"
        if self.model.cache.max_rows < max_rows:
            return f"the draft has room for {self.model.cache.max_rows} rows, the target for {max_rows}"
        return CudaGraphChains(self._runner, self.pick == "greedy")

    def _stop_threshold(self, row: int, level: int) -> float:
        """The bound below which a row's chain ends."""
        if not self.entropy_goal:
            return self.entropy_stop
        # The first token costs no pass of its own, so a moving threshold always lets it pass. One that has risen too
        # far would observe no acceptance any more.
        return self._thresholds[row].threshold if level else float("-inf")

    def _positions(self, sampling: SamplingTensors, roots: Tensor, depth: int) -> Sequence[Tensor]:
        """Positions of the picked tokens by level, int32 [B] each; faster built at once than level by level."""
        if self.pick != "coupled" or sampling.all_greedy:  # not used
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
        """Picks the tokens of one level.

        Args:
            sampling: Sampling parameters of the rows.
            roots: Positions of the rows' roots, int32 [B].
            positions: Positions of these tokens, int32 [B].
            draw: Number of the level's draw.
            logits: Logits of the level [B, V].
            chains: Root and draft tokens so far. Read only if there are logits processors.

        Returns:
            Tokens [B], and the distributions of sampled ones.

        Raises:
            ValueError: If logits are not finite, on the CPU.
        """
        if self.pick != "sampled" and logits.is_cpu:  # sampled tokens are checked by their distributions
            require_finite_logits("draft_model", logits)
        if self.tokenizers == "slem":
            return logits.argmax(1), None
        # the target's processors apply to q too, each row after its own chain
        if sampling.logits_processors is not None:
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


def _check_distributions(dists: TokenDistributions) -> TokenDistributions:
    """Returns distributions of draft tokens.

    Raises:
        ValueError: If one has no token, on the CPU. The engine then counts a fault for its row.
    """
    if dists.lse.is_cpu and math.isnan(sum(dists.lse.tolist())):  # elsewhere the check would wait for the device
        raise ValueError(not_finite_message("draft_model", dists.logits.dtype))
    return dists


DRAFTER = DraftModelDrafter

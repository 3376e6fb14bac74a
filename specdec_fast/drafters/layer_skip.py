"""Self-speculation: the target drafts for itself with some attention and MLP sub-blocks skipped (Zhang et al. 2023).

Early exit after layer E is the case that skips everything behind E. Drafted tokens are staged behind the committed
prefix in the target's own cache, so the remaining layers read the exact keys and values of the prefix. Then the row is
rolled back, and verification writes the same slots again in all layers. Committed keys and values are never touched.
States of recurrent layers are copied before, and written back.

A draft ends at its budget (`stop="fixed"`). It may end earlier, after the first token at which the largest probability
of the draft's distribution at temperature 1 is below a threshold (`"threshold"`). That threshold may follow the
acceptance rate (`"adaptive"`). The token is kept and verified, so stopping is lossless under every rule.
Tests: tests/drafters/test_layer_skip.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_fast.adaptive.budget import MovingThreshold
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device, select_entries
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft
from specdec_fast.core.finite_logits import require_finite_logits
from specdec_fast.core.proposal_kind import check_pick
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.sampling.target_distributions import chain_distributions
from specdec_fast.targets.skipped_layers import SkippedLayers, choice_path, read_choice
from specdec_kernels import draft_sample
from specdec_kernels.unknown_names import unknown_name

STOPS = ("adaptive", "fixed", "threshold")


@dataclass(slots=True)
class _Row:
    """The draft of one row while it grows.

    Attributes:
        row: Row number.
        text: Committed tokens.
        limit: Budget.
        tokens: Drafted tokens.
        dist_rows: Row of each drafted token among the draft distributions.
    """

    row: int
    text: Sequence[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    dist_rows: list[int] = field(default_factory=list)


class LayerSkipDrafter:
    """Drafts chains with the target itself, some of whose sub-blocks are skipped.

    Skipped sub-blocks are given by `skip_attention` and `skip_mlp`, or by `exit_after`, or by `layers`. Without any of
    them, the choice that was tuned for this model id applies, else the middle half of the layers.

    A target other than the engine's own works, but costs full passes over committed tokens and gains nothing.

    Args:
        target: The target, which must offer `skip_layers` (`HuggingFaceTarget` does).
        skip_attention: Layers whose attention is skipped.
        skip_mlp: Layers whose MLP is skipped.
        exit_after: The number of first layers that run.
        layers: File of `specdec tune layers`.
        stop: When a draft ends: "adaptive", "threshold" or "fixed".
        threshold: Probability below which a draft ends; the first value if `stop` is "adaptive".
        goal: Acceptance rate that the adaptive threshold aims at.
        num_draft_tokens: Default budget per row. None: 12, or 4 if `stop` is "fixed".
        pick: "coupled" picks tokens with the noise of rule `replay`, "sampled" samples them and passes their
            distributions, "greedy" takes the arg-max.
        vocab_size: Vocabulary to draft from; ids beyond it are masked. None: the target's.

    Raises:
        ValueError: If the target cannot skip layers, or if options are out of range or contradict each other.

    Source:
        Zhang et al. 2023 (Draft & Verify), section 3.3 for the adaptive threshold.
    """

    name = "layer_skip"
    draws = True
    needs = Needs(topology="chain", host_tokens=True, partial_layers=True)

    def __init__(
        self,
        target: Any,
        *,
        skip_attention: Sequence[int] | None = None,
        skip_mlp: Sequence[int] | None = None,
        exit_after: int | None = None,
        layers: str | None = None,
        stop: str = "adaptive",
        threshold: float = 0.6,
        goal: float = 0.9,
        num_draft_tokens: int | None = None,
        pick: str = "coupled",
        vocab_size: int | None = None,
    ) -> None:
        if not hasattr(target, "skip_layers"):
            raise ValueError(
                f"layer_skip: got a target ({type(target).__name__}) that cannot skip layers; expected one with "
                "`skip_layers`, such as HuggingFaceTarget"
            )
        if stop not in STOPS:
            raise ValueError(unknown_name("layer_skip stop", stop, STOPS))
        check_pick("layer_skip", pick)
        for what, share in (("threshold", threshold), ("goal", goal)):
            if not isinstance(share, (int, float)) or not 0 <= share <= 1:
                raise ValueError(f"layer_skip {what}: got {share!r}; expected a number from 0 to 1")
        if num_draft_tokens is not None and num_draft_tokens < 1:
            raise ValueError(f"layer_skip num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        self.target = target
        self.skip = _resolve_skipped_layers(target, skip_attention, skip_mlp, exit_after, layers)
        self.stop, self.threshold, self.goal, self.pick = stop, float(threshold), float(goal), pick
        self.num_draft_tokens = num_draft_tokens or (4 if stop == "fixed" else 12)
        self.needs = Needs(topology="chain", host_tokens=True, partial_layers=True, dists=pick == "sampled")
        self._vocab_size = min(vocab_size or target.vocab_size, target.vocab_size)
        self._thresholds: dict[int, MovingThreshold] = {}
        self._stored_here: set[int] = set()  # rows that this drafter stored, since the target is not the engine's own
        self._last: tuple[Draft | None, tuple[int, ...]] = (None, ())

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": prefers}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> LayerSkipDrafter:
        """Builds a drafter for `parts.target` that picks tokens as the rule prefers."""
        return cls(parts.target, **{**cls.by_rule(parts.prefers), **options})

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Starts the rows' thresholds, and checks that the target has these rows."""
        max_rows = self.target.cache.max_rows
        if max(rows) >= max_rows:
            raise ValueError(
                f"layer_skip: got row {max(rows)} and a target for {max_rows} rows; expected fewer "
                "rows; use the engine's target"
            )
        begin_row = getattr(self.target, "begin_row", None)
        for row in rows:
            self._thresholds[row] = MovingThreshold(self.threshold, self.goal)
            if begin_row is not None:  # for another target than the engine's
                begin_row(row, view.longest(row))

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Drafts chains by passes of the target that skip layers."""
        drafts = [_Row(row, view.tokens(row), limit) for row, limit in zip(rows, budget.nodes)]
        going = [at for at, own in enumerate(drafts) if own.limit > 0 and self._reserve(own)]
        parts: list[TokenDistributions] = []
        if going:
            cache, members = self.target.cache, [drafts[at].row for at in going]
            self._catch_up([drafts[at] for at in going], select_entries(cache.lengths, members).tolist())
            stored = [len(drafts[at].text) - 1 for at in going]
            with cache.provisional(members, stored), self.target.skip_layers(self.skip):
                self._draft_levels(view, drafts, going, rng, parts)
        sampled = self.pick == "sampled" and bool(parts)
        draft = Draft.chains(
            rows,
            [[own.text[-1], *own.tokens] for own in drafts],
            dist_rows=[own.dist_rows for own in drafts] if sampled else None,
            dists=concat_distributions(parts) if sampled else None,
            device=view.device,
        )
        self._last = (draft, tuple(budget.nodes))
        return draft

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Adapts the thresholds of rows that drafted in this step, if `stop` is "adaptive"."""
        last, limits = self._last
        if self.stop != "adaptive" or draft is not last:
            return
        num_accepted = acceptance.read_num_accepted()
        for row, count, limit, accepted in zip(draft.host_rows(), draft.counts, limits, num_accepted):
            if count > 1 and row in self._thresholds:
                self._thresholds[row].update(accepted, count - 1, full=count - 1 == limit)

    def release(self, rows: Sequence[int]) -> None:
        """Forgets thresholds, and frees pages that this drafter reserved in another target."""
        for row in rows:
            self._thresholds.pop(row, None)
        mine = self._stored_here.intersection(rows)
        self._stored_here -= mine
        self.target.cache.release(sorted(mine))

    def _reserve(self, own: _Row) -> bool:
        """Reserves pages for a draft; returns whether they are available."""
        length = len(own.text) - 1 + own.limit
        return length <= self.target.max_length and self.target.cache.reserve(own.row, length)

    def _catch_up(self, drafts: list[_Row], held: list[int]) -> None:
        """Stores committed tokens that the target has not stored: none if it is the engine's own."""
        behind = [(own, have) for own, have in zip(drafts, held) if have < len(own.text) - 1]
        if not behind:
            return
        self._stored_here.update(own.row for own, _ in behind)
        shape = chain_layout(
            tuple(own.row for own, _ in behind),
            tuple(len(own.text) - 1 - have for own, have in behind),
            self.target.device,
        )
        fed = [token for own, have in behind for token in own.text[have:-1]]
        self.target.extend(
            shape.rows, host_to_device(fed, torch.int64, self.target.device), shape.offsets, logits=False
        )

    def _draft_levels(
        self, view: StateView, drafts: list[_Row], going: list[int], rng: Rng, parts: list[TokenDistributions]
    ) -> None:
        """Drafts level by level. The token before each level is fed, and disappears with the rollback."""
        device, used = self.target.device, 0
        fed = host_to_device([drafts[at].text[-1] for at in going], torch.int64, device)
        level = 0
        while going:
            own = [drafts[at] for at in going]
            shape = chain_layout(tuple(each.row for each in own), (1,) * len(own), device)
            output = self.target.extend(shape.rows, fed, shape.offsets, logits=shape.last)
            logits = output.logits[:, : self._vocab_size]
            if logits.is_cpu:  # elsewhere the check would wait for the device
                require_finite_logits(self.name, logits)
            confidence = [1.0] * len(own)
            if self.stop != "fixed":
                wide = logits.float()
                confidence = (wide.amax(1) - wide.logsumexp(1)).exp().tolist()
            roots = rng.positions if len(own) == len(drafts) else select_entries(rng.positions, going)
            picked, dists = self._pick_tokens(view, own, logits, roots, level, rng.first_draw)
            if dists is not None:
                parts.append(dists)
            staying = []
            for place, (each, token) in enumerate(zip(own, picked.tolist())):
                each.tokens.append(token)
                each.dist_rows.append(used + place)
                if len(each.tokens) < each.limit and confidence[place] >= self._stop_threshold(each.row):
                    staying.append(place)
            used += len(own)
            level += 1
            fed = picked if len(staying) == len(own) else select_entries(picked, staying)
            going = [going[place] for place in staying]

    def _stop_threshold(self, row: int) -> float:
        """Probability below which a draft ends."""
        if self.stop == "fixed":
            return 0.0
        return self._thresholds[row].threshold if self.stop == "adaptive" else self.threshold

    def _pick_tokens(
        self, view: StateView, own: list[_Row], logits: Tensor, roots: Tensor, level: int, first_draw: int
    ) -> tuple[Tensor, TokenDistributions | None]:
        """Tokens of one level and, if sampled, their distributions."""
        sampling, dists = view.sampling([each.row for each in own]), None
        # the target's processors apply to the draft too, each row after its own chain
        if sampling.logits_processors is not None:
            dists = chain_distributions(logits, sampling, roots, [[each.text[-1], *each.tokens] for each in own])
            logits = dists.logits
        if self.pick == "greedy":
            return logits.argmax(1), None
        if self.pick == "coupled":
            return sampling.sample_replay(logits, roots + (level + 1)), None
        dists = sampling.distributions(logits) if dists is None else dists
        index = torch.full_like(roots, first_draw + level)
        return draft_sample(dists.logits, *dists.stats, sampling.seeds, roots, index, mass=dists.mass), dists


def _resolve_skipped_layers(
    target: Any,
    skip_attention: Sequence[int] | None,
    skip_mlp: Sequence[int] | None,
    exit_after: int | None,
    layers: str | None,
) -> SkippedLayers:
    """The skipped sub-blocks. Raises ValueError for contradictions and for layers that the model does not have."""
    listed = skip_attention is not None or skip_mlp is not None
    given = [
        name
        for name, there in (
            ("skip_attention/skip_mlp", listed),
            ("exit_after", exit_after is not None),
            ("layers", layers is not None),
        )
        if there
    ]
    if len(given) > 1:
        raise ValueError(f"layer_skip: got {' and '.join(given)}; expected one of them")
    count = target.num_layers
    if listed:
        found = SkippedLayers.of(skip_attention or (), skip_mlp or ()).check(count, "layer_skip")
    elif exit_after is not None:
        found = SkippedLayers.after(exit_after, count)
    elif layers is not None:
        found = read_choice(layers, count)
    else:
        model_id = getattr(target, "model_id", "")
        tuned = choice_path(model_id) if model_id else None
        found = read_choice(tuned, count) if tuned is not None and tuned.is_file() else SkippedLayers.middle(count)
    with target.skip_layers(found):  # refuses sub-blocks that cannot be skipped
        pass
    return found


DRAFTER = LayerSkipDrafter

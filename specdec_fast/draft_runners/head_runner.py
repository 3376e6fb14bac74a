"""Runs a trained head over the hidden states of a target, with a paged cache whose rows follow the engine's.

`PagedHead` runs a head's layers with the attention and the cache of targets. `HeadRunner` keeps the true features from
the target's passes, and stores keys and values of committed tokens from them. Drafted trees are staged behind these.
The keys of an accepted draft token came from predicted features and are overwritten (Li et al. 2024, EAGLE).
Tests: tests/draft_runners/test_head_runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.cache.paged import PagedCache
from specdec_fast.cache.shapes import LayerShape
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Slots, StateView, TargetOutput
from specdec_fast.targets import attention
from specdec_fast.targets.output_scaling import check_projection

_PAGE_SIZE = 16


class PagedHead:
    """A trained head with a paged cache. Capacities, device and dtype are the target's.

    Args:
        head: A module of specdec_fast/heads/ with `aux_hidden_states`, `fuse`, `forward` and `read`.
        target: The target, whose embedding and projection the head may use.

    Attributes:
        aux_hidden_states: Hidden states of the target that the head reads.
        vocab_size: V of the target.
        token_ids: Target ids of the columns of the logits, int64 [Vd]; None for all.
        cache: Keys and values of the head.

    Raises:
        ValueError: If the head needs the target's projection and the target has no usable one.
    """

    def __init__(self, head: Any, target: Any) -> None:
        check_projection(head, target)
        attention.register()
        device = target.device
        self.head = head.to(device=device, dtype=target.dtype).eval()
        head.config._attn_implementation = attention.NAME
        self.target, self.device = target, device
        self.aux_hidden_states: tuple[str, ...] = head.aux_hidden_states
        self.vocab_size: int = target.vocab_size
        self.token_ids: Tensor | None = head.token_ids
        config, rows, length = head.config, target.cache.max_rows, target.cache.max_length
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = PagedCache(
            [LayerShape(config.num_key_value_heads, dim, dim)] * config.num_hidden_layers,
            num_pages=rows * -(-length // _PAGE_SIZE) + 1,
            page_size=_PAGE_SIZE,
            max_rows=rows,
            max_length=length,
            dtype=target.dtype,
            device=device,
        )

    @torch.no_grad()
    def features(self, aux_hidden_states: Mapping[str, Tensor]) -> Tensor:
        """Fuses the target's hidden states [M, hidden] by name into features [M, hidden]."""
        found: Tensor = self.head.fuse([aux_hidden_states[name] for name in self.aux_hidden_states])
        return found

    def zero_features(self, *shape: int) -> Tensor:
        """Returns zero features [*shape, hidden]."""
        return torch.zeros(*shape, self.head.hidden_size, dtype=self.target.dtype, device=self.device)

    def extend(self, rows: Tensor, tokens: Tensor, features: Tensor, offsets: Tensor) -> Tensor:
        """Appends places to rows, causally.

        Args:
            rows: Row of each request, int32 [B].
            tokens: Packed tokens, int64 [M].
            features: Features of the token before each, [M, hidden].
            offsets: First place of each request, int32 [B + 1].

        Returns:
            Predicted features [M, hidden].
        """
        return self._run(tokens, features, self.cache.stage(rows, offsets, tokens.shape[0], advance=True))

    def score(self, draft: Draft, features: Tensor) -> Tensor:
        """Returns predicted features [M, hidden] of a draft's nodes, from the features of the tokens before them."""
        plan = None if draft.is_chain else draft.get_plan()
        slots = self.cache.stage(draft.rows, draft.offsets, draft.num_nodes, plan)
        return self._run(draft.tokens, features, slots)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, columns] of predicted features [N, hidden]."""
        found: Tensor = self.head.read(hidden, self.target.lm_head)
        padded = self.token_ids is None and found.shape[-1] > self.vocab_size
        return found[..., : self.vocab_size] if padded else found

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Returns embeddings [..., hidden] of tokens int64 [...]: the head's own, or the target's."""
        own = getattr(self.head, "embed_tokens", None)
        found: Tensor = self.target.embed(tokens) if own is None else own(tokens)
        return found

    @torch.no_grad()
    def _run(self, tokens: Tensor, features: Tensor, slots: Slots) -> Tensor:
        embedded = self.embed(tokens)
        packed = attention.PackedContext(slots, self.cache.keys, self.cache.values)
        found: Tensor = self.head(embedded[None], features[None], slots.positions[None], packed=packed)
        return found[0]


@dataclass(slots=True)
class _Row:
    """State of one row.

    Attributes:
        features: True features of the tokens from `first` on, [n, hidden].
        first: Position of the first of these tokens.
        stored: Places whose keys come from true features.
        is_shared: Whether CUDA-graph steps continue from these features.
    """

    features: Tensor
    first: int = 0
    stored: int = 0
    is_shared: bool = False


class HeadRunner:
    """A source of logits over a trained head (`specdec_fast.trees.logits_source.Source`).

    Place i of a row pairs token i + 1 with the feature of token i, so a text of n tokens has n - 1 places. The last one
    is the root of the trees. Rows with missing features are not drafted for: texts of one token, and rows that the
    drafter did not observe from the start.

    Args:
        model: A `PagedHead`, or an object with its methods.
        name: Name of the drafter, for messages.
    """

    keeps_staged_keys = False

    def __init__(self, model: Any, name: str) -> None:
        self.model, self._name = model, name
        self.device: torch.device = model.device
        self.vocab_size: int = model.vocab_size
        self.token_ids: Tensor | None = model.token_ids
        self._rows: dict[int, _Row] = {}
        self._hidden: Tensor | None = None  # predicted features of the last pass
        self._last: list[int] = []  # rows of the last pass
        self._offsets: Tensor | None = None  # first node of each of these rows in the last pass
        self._at_roots = False  # whether the last pass was that of `catch_up`

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Adds rows, with the hidden states of all their tokens but the roots."""
        counts = [view.length(row) - 1 for row in rows]
        if prompt_output is not None:
            self._require_states(prompt_output)
        else:
            for row in rows:
                self._rows[row] = _Row(torch.empty(0, 0, device=self.device))
            return
        features = self.model.features(prompt_output.aux_hidden_states)
        for row, part in zip(rows, features.split(counts)):
            self._rows[row] = _Row(part.clone())

    def _require_states(self, output: TargetOutput) -> None:
        """Raises ValueError if hidden states that the head reads are missing."""
        missing = [name for name in self.model.aux_hidden_states if name not in output.aux_hidden_states]
        if missing:
            raise ValueError(
                f"{self._name} head: got no hidden state {', '.join(missing)} from the target; expected all that the "
                f"head reads: {', '.join(self.model.aux_hidden_states)}; its layers may not be those that run"
            )

    def reserve(self, row: int, tokens: int, length: int) -> bool:
        """Reserves pages for `length` tokens; False also if features of tokens before the newest are missing."""
        own = self._rows[row]
        if tokens < 2 or own.first + own.features.shape[0] != tokens - 1:
            return False
        return length <= self.model.cache.max_length and bool(self.model.cache.reserve(row, length))

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Stores new places from true features, and the root's place again. The cache then ends before the root."""
        fed: list[int] = []
        counts: list[int] = []
        parts: list[Tensor] = []
        for row, text in zip(rows, texts):
            own = self._rows[row]
            start = min(own.stored, len(text) - 2)
            own.features, own.first = own.features[start - own.first :], start
            fed += text[start + 1 :]
            counts.append(len(text) - 1 - start)
            parts.append(own.features)
            own.stored = start
        shape = chain_layout(tuple(rows), tuple(counts), self.device)
        cache = self.model.cache
        # the root's place of the last pass was dropped, and a tree has stored it again
        cache.set_lengths(rows, [self._rows[row].stored for row in rows])
        tokens = host_to_device(fed, torch.int64, self.device)
        hidden = self.model.extend(shape.rows, tokens, torch.cat(parts), shape.offsets)
        cache.rollback(rows, [len(text) - 2 for text in texts])
        for row, text in zip(rows, texts):
            own = self._rows[row]
            own.stored = len(text) - 1
            own.features, own.first = own.features[-1:], len(text) - 2
        each = chain_layout(tuple(rows), (1,) * len(rows), self.device)
        self._set_last_pass(hidden[shape.last], list(rows), each.offsets)
        self._at_roots = True

    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """Runs one pass over whole trees, which grow at their ends; returns predicted features [M, hidden]."""
        assert self._hidden is not None and self._offsets is not None
        starts = self._offsets[:-1]
        if list(rows) != self._last:
            starts = starts[host_to_device([self._last.index(row) for row in rows], torch.int64, self.device)]
        if self._at_roots and draft.max_depth == 0:
            return self._hidden if list(rows) == self._last else self._hidden[starts]
        before = self._hidden.shape[0]  # the features before the roots follow those of the last pass
        source = torch.where(draft.parents < 0, before + draft.row_of, starts[draft.row_of] + draft.parents)
        both = torch.cat([self._hidden, *(self._rows[row].features for row in rows)])
        hidden = self.model.score(draft, both[source])
        self._set_last_pass(hidden, list(rows), draft.offsets)
        return hidden

    def logits(self, scored: Tensor) -> Tensor:
        """Returns the logits [N, columns] of rows of a result of `score`."""
        found: Tensor = self.model.logits(scored)
        return found

    def record_trees(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """Does nothing: keys of accepted tokens come from true features."""

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Stores the true features of accepted tokens."""
        self._require_states(output)
        counts, width = [accepted + 1 for accepted in acceptance.read_num_accepted()], acceptance.path.shape[1]
        places = [row * width + node for row, count in enumerate(counts) for node in range(count)]
        at = acceptance.path.flatten()[host_to_device(places, torch.int64, self.device)].long()
        features = self.model.features(
            {name: output.aux_hidden_states[name][at] for name in self.model.aux_hidden_states}
        )
        for row, part in zip(draft.host_rows(), features.split(counts)):
            own = self._rows[row]
            if own.first + own.features.shape[0] >= view.length(row) - 1:
                continue  # observed before
            if own.features.shape[0]:
                own.features = torch.cat([own.features, part.to(own.features.dtype)])
            elif own.first == 0 and view.length(row) - 1 == part.shape[0]:  # a prompt of one token
                own.features = part.clone()

    def share_features(self, row: int) -> Tensor:
        """Returns the features [n, hidden] of a row's last tokens but the root, for CUDA-graph steps."""
        self._rows[row].is_shared = True
        return self._rows[row].features

    def return_features(self, row: int, features: Tensor, stored: int) -> None:
        """Updates a row whose features were shared.

        Args:
            row: The row.
            features: Features of the tokens from `stored` on, [n, hidden].
            stored: Places that are stored.
        """
        own = self._rows.get(row)
        if own is not None and own.is_shared:
            self._rows[row] = _Row(features, stored, stored)

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows and gives back their pages."""
        self.model.cache.release([row for row in rows if self._rows.pop(row, None) is not None])

    def _set_last_pass(self, hidden: Tensor, rows: list[int], offsets: Tensor) -> None:
        self._hidden, self._last, self._offsets, self._at_roots = hidden, rows, offsets, False

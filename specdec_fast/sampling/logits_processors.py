"""Logits processors: texts of nodes, penalties, bias, banned and forced tokens, allowed tokens and grammars.

Everything is sparse and follows the committed tokens as they come. Nothing of the size of the vocabulary is built per
step, except masks of grammars. Operator `process_logits` does the arithmetic.

Tests: tests/sampling/test_logits_processors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import copy_to_device, host_to_device, table_to_device
from specdec_fast.sampling.grammar import GrammarState, pack_token_ids
from specdec_fast.sampling.text_processors import TextProcessors, TextState, rows_of_nodes
from specdec_kernels import (
    ALWAYS,
    Additions,
    Forced,
    NodePaths,
    Overlay,
    Penalties,
    TokenMasks,
    process_logits,
    process_logits_overlay,
)

if TYPE_CHECKING:
    from specdec_fast.sampling.params import SamplingParams

_BANNED = float("-inf")


class TokenCounts:
    """The distinct committed tokens of rows with penalties, and how often each was generated.

    Prompt tokens count 0 times; only the repetition penalty reads them. The tables on the device grow as needed, and
    `tables` writes the changes of all rows at once.

    Args:
        device: Device of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[int, dict[int, int]] = {}  # per row: token -> column
        self._counts: dict[int, list[int]] = {}
        self._changed: dict[int, dict[int, tuple[int, int]]] = {}  # per row, not written yet: column -> (token, count)
        self._ids = self._times = self._zeros(0, 0)
        self._sizes = self._zeros(0)

    def _zeros(self, *shape: int) -> Tensor:
        """Zeros that may be written to inside and outside of inference mode, int32."""
        with torch.inference_mode(False):
            return torch.zeros(*shape, dtype=torch.int32, device=self._device)

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def join(self, row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Assigns a text to a row."""
        self._places[row], self._counts[row], self._changed[row] = {}, [], {}
        self._write(row, prompt, 0)
        self._write(row, generated, 1)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Records generated tokens of a row."""
        self._write(row, tokens, 1)

    def leave(self, row: int) -> None:
        """Forgets the text of a row, if it has one."""
        if row in self._places:
            self._changed[row] = {}  # first, so that an interrupt leaves a size of 0 and drops unwritten changes
            self._counts.pop(row, None)
            del self._places[row]

    def _write(self, row: int, tokens: Sequence[int], times: int) -> None:
        """Adds `times` to the count of each token, on the host."""
        places, counts = self._places[row], self._counts[row]
        for token in tokens:
            column = places.setdefault(token, len(places))
            if column == len(counts):
                counts.append(0)
            counts[column] += times
        changed = self._changed.setdefault(row, {})
        changed.update({places[token]: (token, counts[places[token]]) for token in tokens})

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Brings the tables up to date and returns them.

        Returns:
            Token ids and counts, int32 [rows, capacity] each, and the number of entries of each row, int32 [rows].
        """
        if self._changed:
            sizes, device = {row: len(self._places.get(row, ())) for row in self._changed}, self._device
            self._grow(max(sizes) + 1, max(sizes.values()))
            self._sizes[host_to_device(list(sizes), torch.int64, device)] = host_to_device(
                list(sizes.values()), torch.int32, device
            )
            cells = [(row, at, *cell) for row, changed in self._changed.items() for at, cell in changed.items()]
            if cells:
                dtypes = (torch.int64, torch.int64, torch.int32, torch.int32)
                rows, columns, tokens, counts = map(host_to_device, zip(*cells), dtypes, [device] * 4)
                self._ids[rows, columns] = tokens
                self._times[rows, columns] = counts
            self._changed = {}
        return self._ids, self._times, self._sizes

    def _grow(self, rows: int, used: int) -> None:
        """Enlarges the tables if they are too small."""
        held, capacity = self._ids.shape
        if rows <= held and used <= capacity:
            return
        rows, used = max(rows, held), capacity if used <= capacity else max(64, 2 * used)
        ids, times, sizes = self._zeros(rows, used), self._zeros(rows, used), self._zeros(rows)
        ids[:held, :capacity], times[:held, :capacity], sizes[:held] = self._ids, self._times, self._sizes
        self._ids, self._times, self._sizes = ids, times, sizes  # together, since memory may run out above


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """The logits processors of the B requests of a batch.

    Attributes:
        rows: Row of each request in `counts`, int32 [B].
        factors: Repetition, presence and frequency penalty of each request, float32 [B, 3]. None if no request has any.
        counts: The token counts that penalties read.
        additions: Bias, bans and minimum lengths, or None.
        forced: Forced tokens, or None.
        allowed: Allowed ids of each request, or None for all ids.
        grammar_states: Grammar of each request, or None.
        shifts: Whether a logit may become another finite number (penalties, bias), and not only -inf.
        text_processors: Processors that read the text of every node, or None. They come first.
    """

    rows: Tensor
    factors: Tensor | None
    counts: TokenCounts
    additions: Additions | None
    forced: Forced | None
    allowed: tuple[tuple[int, ...] | None, ...]
    grammar_states: tuple[GrammarState | None, ...]
    shifts: bool
    text_processors: TextProcessors | None = None
    _words: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def apply(self, logits: Tensor, paths: NodePaths, request_of: Tensor) -> Tensor:
        """Applies the processors to logits in place.

        Half formats become float32 copies if logits are shifted, since rounding would lose small penalties. Bans are
        exact in every format.

        Args:
            logits: [R, V]; each row belongs to one node.
            paths: The nodes, with the tokens before them.
            request_of: Request of each row, int64 [R].

        Returns:
            The processed logits, [R, V].
        """
        return self._apply(self.apply_text_processors(logits, paths), paths, request_of)

    def apply_to_draft(self, logits: Tensor, paths: NodePaths, request_of: Tensor) -> Tensor:
        """Applies the processors to a draft model's logits, as `apply` does. Failures of custom ones are ignored."""
        if self.text_processors is not None:
            logits = self.text_processors.apply(logits, paths, drafting=True)
        return self._apply(logits, paths, request_of)

    def apply_text_processors(self, logits: Tensor, paths: NodePaths) -> Tensor:
        """Applies only the processors that read texts. `apply` includes them, `make_overlay` does not."""
        return logits if self.text_processors is None else self.text_processors.apply(logits, paths, drafting=False)

    def _apply(self, logits: Tensor, paths: NodePaths, request_of: Tensor) -> Tensor:
        """Applies the processors that do not read texts."""
        if self.shifts and logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        process_logits(logits, paths, *self._operator_arguments(logits.shape[1], paths, request_of))
        return logits

    def make_overlay(self, logits: Tensor, paths: NodePaths, request_of: Tensor) -> Overlay:
        """Returns an overlay that operators apply when they load the logits, with the exactness of float32.

        It lacks the processors of `apply_text_processors`.

        Args:
            logits: [R, V] in any format but float64. They are not changed.
            paths: The nodes, with the tokens before them.
            request_of: Request of each row, int64 [R].
        """
        return process_logits_overlay(logits, paths, *self._operator_arguments(logits.shape[1], paths, request_of))

    def _operator_arguments(
        self, vocab: int, paths: NodePaths, request_of: Tensor
    ) -> tuple[Penalties | None, Additions | None, Forced | None, TokenMasks | None]:
        """The processors in the order of the operators' arguments."""
        penalties = None
        if self.factors is not None:
            penalties = Penalties(self.factors, self.rows, *self.counts.tables())
        return penalties, self.additions, self.forced, self._masks(vocab, paths, request_of)

    def explain_empty(self, request: int) -> str | None:
        """Explains why all logits of a request are -inf.

        Args:
            request: Place of the request in the batch.

        Returns:
            The reason. None if no processor can cause it, so that the model did.
        """
        grammar_state = self.grammar_states[request]
        if grammar_state is not None and grammar_state.error is not None:
            return f"grammar: {grammar_state.error}"
        if grammar_state is not None:
            return (
                "grammar: no token that the request allows continues the text, and it may not end here; check the "
                "grammar against the vocabulary, banned tokens and min_new_tokens"
            )
        limited = self.allowed[request] is not None
        if self.text_processors is not None:
            limited |= self.text_processors.states[request] is not None
        if self.additions is not None:  # finite biases ban nothing
            start, stop = self.additions.offsets[request : request + 2].tolist()
            limited |= bool((self.additions.values[start:stop] == float("-inf")).any())
        if self.forced is not None:
            limited |= bool(self.forced.offsets[request] < self.forced.offsets[request + 1])
        return "banned, allowed and forced tokens leave no token to choose from" if limited else None

    def _masks(self, vocab: int, paths: NodePaths, request_of: Tensor) -> TokenMasks | None:
        """The masks of allowed ids and of grammars; None if no request has any."""
        guided = [request for request, grammar_state in enumerate(self.grammar_states) if grammar_state is not None]
        width = max(
            [
                -(-vocab // 32),
                *(grammar_state.width for grammar_state in self.grammar_states if grammar_state is not None),
            ]
        )
        if not guided and not any(ids is not None for ids in self.allowed):
            return None
        if width not in self._words:
            self._words[width] = self._allowed_masks(width)
        words, mask_of = self._words[width]
        index = copy_to_device(mask_of, request_of.device)[request_of]
        if not guided:
            return TokenMasks(copy_to_device(words, request_of.device), index)
        device = index.device
        index, mask_of = index.cpu(), mask_of.cpu()
        nodes = None if paths.nodes is None else paths.nodes.tolist()
        tokens, parents, offsets = paths.tokens.tolist(), paths.parents.tolist(), paths.offsets.tolist()
        parts, used = [words], words.shape[0]
        for request in guided:
            start, stop = offsets[request : request + 2]
            row_of = rows_of_nodes(start, stop, nodes)
            own = torch.zeros(stop - start, width, dtype=torch.int32)
            grammar_state = self.grammar_states[request]
            assert grammar_state is not None
            reached = grammar_state.fill_masks(tokens[start:stop], parents[start:stop], own, row_of)
            if mask_of[request] >= 0:
                own &= words[int(mask_of[request])]
            parts.append(own)
            for node, row in row_of.items():
                if reached[node]:
                    index[row] = used + node
            used += stop - start
        return TokenMasks(copy_to_device(torch.cat(parts), device), copy_to_device(index, device))

    def _allowed_masks(self, width: int) -> tuple[Tensor, Tensor]:
        """Masks of allowed ids, int32 [K, width], and the mask of each request or -1, int32 [B], on the CPU."""
        listed = sorted({ids for ids in self.allowed if ids is not None})
        words = torch.zeros(len(listed), width, dtype=torch.int32)
        for at, ids in enumerate(listed):
            words[at] = pack_token_ids(ids, width)
        index = [-1 if ids is None else listed.index(ids) for ids in self.allowed]
        return words, torch.tensor(index, dtype=torch.int32)


def has_penalties(params: SamplingParams) -> bool:
    """Returns whether a request has repetition, presence or frequency penalties."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def pack_processors(
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    stop_ids: Sequence[Sequence[int]],
    counts: TokenCounts,
    grammar_states: Sequence[GrammarState | None],
    text_states: Sequence[TextState | None],
    device: torch.device,
) -> LogitsProcessors | None:
    """Collects the logits processors of a batch.

    Args:
        rows: Row of each of the B requests.
        params: Parameters of each request.
        prompt_lengths: Prompt tokens of each request.
        stop_ids: Token ids that end each text.
        counts: Token counts of the rows with penalties.
        grammar_states: Grammar of each request, or None.
        text_states: Processors of each request that read its text, or None.
        device: Device of the tensors.

    Returns:
        The processors, or None if no request has any.
    """
    added: list[dict[tuple[int, int], float]] = []
    forced: list[dict[int, int]] = []
    for own, prompt, ends in zip(params, prompt_lengths, stop_ids):
        banned = set(own.banned_token_ids)
        entries = {(token, ALWAYS): bias for token, bias in own.logit_bias.items() if bias and token not in banned}
        entries |= {(token, ALWAYS): _BANNED for token in own.banned_token_ids}
        if own.min_new_tokens:
            entries |= {(token, prompt + own.min_new_tokens): _BANNED for token in ends if token not in banned}
        added.append(entries)
        forced.append({prompt + index: token for index, token in own.forced.items()})
    penalised = any(map(has_penalties, params))
    allowed = tuple(own.allowed_token_ids for own in params)
    limited = any(ids is not None for ids in allowed) or any(grammar_states)
    if not (penalised or any(added) or any(forced) or limited or any(text_states)):
        return None

    def tensor(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
        return host_to_device(values, dtype, device)

    additions = None
    if any(added):
        keys = [key for entries in added for key in entries]
        additions = Additions(
            tensor([0, *accumulate(map(len, added))]),
            tensor([token for token, _ in keys]),
            tensor([value for entries in added for value in entries.values()], torch.float32),
            tensor([until for _, until in keys]),
        )
    listed = None
    if any(forced):
        listed = Forced(
            tensor([0, *accumulate(map(len, forced))]),
            tensor([position for entries in forced for position in entries]),
            tensor([token for entries in forced for token in entries.values()]),
        )
    factors = None
    if penalised:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        factors = table_to_device([[getattr(own, name) for name in names] for own in params], torch.float32, device)
    # rows without penalties may be outside of the tables, so any row of the tables takes their place
    places = [row if row in counts else next((r for r in rows if r in counts), 0) for row in rows]
    shifts = penalised or any(value != _BANNED for entries in added for value in entries.values())
    texts = TextProcessors(tuple(text_states)) if any(text_states) else None
    grammars = tuple(grammar_states)
    return LogitsProcessors(tensor(places), factors, counts, additions, listed, allowed, grammars, shifts, texts)

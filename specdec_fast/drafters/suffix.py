"""Suffix decoding: drafts trees of the continuations of the longest repeated suffix, in this text and in finished ones.

Needs no model. Every row keeps a suffix automaton of its own text. Texts of finished requests may be stored in a
counted tree that all rows read. The source whose tree promises more accepted tokens proposes.
Tests: tests/drafters/test_suffix.py and the contract suite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec_fast.core.draft import Draft
from specdec_fast.core.proposal_kind import check_pick
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.retrieval.suffix_index import structures
from specdec_fast.retrieval.text_memory import TextMemory
from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint

log = logging.getLogger("specdec_fast")


_CONTEXT = 16  # longest match in finished texts, and prompt tokens stored with a generated text


_LONG = 4  # tokens of a match that is hardly chance


@dataclass(slots=True)
class _Row:
    """State of one row.

    Attributes:
        automaton: Suffix automaton of the text.
        skipped: Tokens in front of `text`.
        text: The text from `_CONTEXT` tokens before the generated ones.
        length: Tokens at the start of the request.
    """

    automaton: Any
    skipped: int
    text: list[int]
    length: int

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends new committed tokens."""
        if new := tokens[len(self.automaton) :]:
            self.automaton.extend(new)
            self.text += new


class SuffixDrafter:
    """Drafts counted continuations of the longest repeated suffix.

    With `shared`, texts of one request are drafted for another. Rules that replay stay exact functions of the seed.
    Other rules then key their uniforms by the request too (`Needs.cross_request`), so a text is no function of its
    seed. That is why `from_parts` shares by default only under rules that replay and greedy ones.

    Args:
        num_draft_tokens: Default budget per row.
        min_match: Shortest suffix that proposes.
        factor: Depth limit of a tree, as a multiple of the length of the match.
        min_probability: Paths with a smaller estimated probability are dropped.
        pick: "greedy" ranks paths by counts, "coupled" with the noise of rule `replay`. "sampled" means "greedy" here.
        shared: Store texts of finished requests for other requests.
        max_tokens: Capacity of that memory, in tokens. The oldest texts are dropped first.
        store: File from which these texts are loaded and to which they are saved. Implies `shared`.

    Attributes:
        confidence: Level of each row's last proposal: the binary digits of the length of the match, at most 5.
        level_rates: Usual acceptance of the first token, by level.

    Raises:
        ValueError: If an option is out of range, or if `store` cannot be read.

    Source:
        Oliaro et al. 2024 (SuffixDecoding), section 3, for counted trees, length by match and best-first growth; Hu et
        al. 2024 (SAM Decoding), section 3, for the automaton.
    """

    name = "suffix"
    needs = Needs(topology="tree", host_tokens=True)
    level_rates = (0.2, 0.25, 0.4, 0.6, 0.8, 0.9)
    may_rest = True

    def __init__(
        self,
        num_draft_tokens: int = 16,
        min_match: int = 1,
        factor: float = 2.0,
        min_probability: float = 0.1,
        pick: str = "greedy",
        shared: bool = False,
        max_tokens: int = 100_000,
        store: str | None = None,
    ) -> None:
        if num_draft_tokens < 1 or min_match < 1:
            raise ValueError(
                f"suffix num_draft_tokens, min_match: got {num_draft_tokens}, {min_match}; expected at least 1"
            )
        if not 0 < factor < math.inf or not 0 <= min_probability <= 1:
            raise ValueError(
                f"suffix factor, min_probability: got {factor}, {min_probability}; expected a finite number "
                "above 0, and 0 to 1"
            )
        check_pick("suffix", pick)
        if not isinstance(shared, bool):
            raise ValueError(f"suffix shared: got {shared!r}; expected true or false")
        if max_tokens < 1:
            raise ValueError(f"suffix max_tokens: got {max_tokens}; expected at least 1")
        self.num_draft_tokens = num_draft_tokens
        self.pick = pick
        self._how = (min_match, float(factor), float(min_probability))
        self._make = structures().Automaton
        self.memory = TextMemory(max_tokens) if shared or store is not None else None
        self.needs = replace(self.needs, cross_request=self.memory is not None)
        self._store, self._vocabulary = store, ""
        self._rows: dict[int, _Row] = {}
        self.confidence: list[int] = []
        if store is not None:
            self._open_store(None)

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": prefers, "shared": prefers in ("coupled", "greedy")}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> SuffixDrafter:
        """Builds a drafter that picks as the rule prefers and shares by default where that is exact."""
        store = options.pop("store", None)
        made = cls(**{**cls.by_rule(parts.prefers), **options})
        if store is not None:
            made.memory = made.memory or TextMemory(options.get("max_tokens", 100_000))
            made.needs = replace(made.needs, cross_request=True)
            made._store, made._vocabulary = store, fingerprint(parts.tokenizer)
            made._open_store(parts.target.vocab_size)
        return made

    def _open_store(self, vocab_size: int | None) -> None:
        """Loads the file `store` if it exists. Raises ValueError."""
        assert self.memory is not None and self._store is not None
        if Path(self._store).exists():
            self.memory.load(self._store, self._vocabulary, vocab_size)
        elif not Path(self._store).absolute().parent.is_dir():
            raise ValueError(f"suffix store: got {self._store!r}; expected a file in a folder that exists")

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Builds the rows' suffix automata over their prompts."""
        for row in rows:
            tokens = view.tokens(row)
            skipped = max(len(tokens) - _CONTEXT, 0)
            self._rows[row] = made = _Row(self._make(), skipped, [], len(tokens))
            made.automaton.extend(tokens)
            made.text += tokens[skipped:]

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Grows trees from the row's automaton or the shared texts, whichever promises more accepted tokens."""
        return Draft.trees(rows, self.grow_trees(view, rows, budget.nodes, rng), device=view.device)

    def grow_trees(
        self, view: StateView, rows: Sequence[int], limits: Sequence[int], rng: Rng
    ) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens and parents of the trees that `propose` packs, the root first, and sets `confidence`."""
        trees, self.confidence = [], []
        for row, limit, noise in zip(rows, limits, rng.replay_noise_keys(view.sampling(rows), self.pick)):
            own, text = self._rows[row], view.tokens(row)
            own.extend(text)
            tokens, parents, match = self._tree(own, limit, noise) if limit > 0 else ([], [], 0)
            self.confidence.append(min(match.bit_length(), len(self.level_rates) - 1))
            trees.append(([text[-1], *tokens], [-1, *parents]))
        return trees

    def catch_up(self, view: StateView, rows: Sequence[int]) -> None:
        """Adds tokens of steps that were not observed."""
        for row in rows:
            if row in self._rows:
                self._rows[row].extend(view.tokens(row))

    def ends_rest(self, view: StateView, rows: Sequence[int]) -> bool:
        """Returns whether one of the rows ends with a long match, so that a pause should end (see `AutoDrafter`)."""
        self.catch_up(view, rows)
        for row in rows:
            own = self._rows[row]
            match = own.automaton.match()
            if match < _LONG and self.memory is not None and len(self.memory):
                match = self.memory.grow(own.text[-_CONTEXT:], 1, _CONTEXT, *self._how, None)[3]
            if match >= _LONG:
                return True
        return False

    def _tree(self, row: _Row, limit: int, noise: tuple[int, int] | None) -> tuple[list[int], list[int], int]:
        """Tokens and parents below the root from the source that promises more accepted tokens, and its match."""
        best = row.automaton.grow(limit, *self._how, noise)
        if self.memory is not None and len(self.memory):
            other = self.memory.grow(row.text[-_CONTEXT:], limit, _CONTEXT, *self._how, noise)
            if other[2] > best[2]:
                best = other
        return best[0], best[1], best[3]

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Adds the committed tokens to the rows' automata."""
        self.catch_up(view, draft.host_rows())

    def release(self, rows: Sequence[int]) -> None:
        """Drops the automata of these rows, and adds their texts to the shared ones."""
        remembered = False
        for row in rows:
            own = self._rows.pop(row, None)
            if own is not None and self.memory is not None and len(own.automaton) > own.length:
                self.memory.add(own.text)
                remembered = True
        if remembered and self._store is not None and self.memory is not None:
            try:
                self.memory.save(self._store, self._vocabulary)
            except OSError as error:  # decoding continues; the file keeps its content
                log.warning("suffix store %s cannot be written: %s", self._store, error)
                self._store = None

    def forget(self) -> None:
        """Drops the texts of finished requests. A file `store` keeps its content until the next request ends."""
        if self.memory is not None:
            self.memory = TextMemory(self.memory.max_tokens)


DRAFTER = SuffixDrafter

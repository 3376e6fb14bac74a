"""Jacobi decoding: the target's own choices after a guess of the next tokens become the next guess.

The text is the solution of a triangular system, y_i = choice(y_<i). Every step scores a guess of the next tokens at
once, keeps the prefix that agrees with the target's choices, and uses the choices behind it as the next guess. Under
rule `replay` a choice is the arg-max under noise that is fixed per position, so the iteration has one fixed point at
any temperature: the text of plain decoding. Every rule works; if a rule does not report the choice at every node, the
arg-max of the logits becomes the next guess. For encoder-decoder models see
specdec_fast/targets/encoder_decoder_jacobi.py. Tests: tests/drafters/test_jacobi.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput

Fill = int | Callable[[Sequence[int], int], Sequence[int]]
"""Initial content of a guess: a token id, or a function (text so far, number of tokens) -> tokens."""


@dataclass(slots=True)
class _Row:
    """State of one row.

    Attributes:
        prompt: Prompt tokens.
        start: Absolute position of the first guessed token.
        guess: Guessed tokens from `start` on.
    """

    prompt: int
    start: int = 0
    guess: list[int] = field(default_factory=list)


class JacobiDrafter:
    """Iterates on a block of future tokens.

    Without blocks this is Jacobi decoding (PJ), with `block` Gauss-Seidel-Jacobi decoding (PGJ), and with `block` and
    `horizon` hybrid decoding (HGJ).

    Args:
        block: A guess ends with its block; blocks are counted from the start of the request. None: no blocks.
        horizon: Generated tokens after which plain decoding takes over. None: never.
        fill: Content of a guess where no choice is known: a token id, or a function (text so far, number of tokens) ->
            tokens. None: the newest token.
        num_draft_tokens: Longest guess. None: `block - 1`, or 15 without blocks.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Santilli et al. 2023, section 3, algorithms 1 to 3.
    """

    name = "jacobi"
    needs = Needs(topology="chain", host_tokens=True, node_choices=True)

    def __init__(
        self,
        block: int | None = None,
        horizon: int | None = None,
        fill: Fill | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        for what, got in (("block", block), ("horizon", horizon), ("num_draft_tokens", num_draft_tokens)):
            if got is not None and (not isinstance(got, int) or isinstance(got, bool) or got < 1):
                raise ValueError(f"jacobi {what}: got {got!r}; expected a whole number of at least 1, or none")
        if fill is not None and not callable(fill) and (not isinstance(fill, int) or fill < 0):
            raise ValueError(f"jacobi fill: got {fill!r}; expected a token id, or a function of text and length")
        self.block, self.horizon, self.fill = block, horizon, fill
        self.num_draft_tokens = num_draft_tokens or (15 if block is None else max(block - 1, 1))
        self._rows: dict[int, _Row] = {}
        self._last: Draft | None = None

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> JacobiDrafter:
        """Builds a drafter and checks `fill` against the target's vocabulary."""
        fill, vocab = options.get("fill"), parts.target.vocab_size
        if isinstance(fill, int) and fill >= vocab:
            raise ValueError(f"jacobi fill: got token id {fill}; expected 0..{vocab - 1}")
        return cls(**options)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Starts rows without a guess."""
        for row in rows:
            self._rows[row] = _Row(view.prompt_length(row))

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Guesses the target's choices of the step before, and fills the rest of the guess."""
        chains = []
        for row, limit in zip(rows, budget.nodes):
            text, state = view.tokens(row), self._rows[row]
            count = self._guess_length(len(text) - state.prompt, limit)
            known = state.guess[len(text) - state.start :] if len(text) >= state.start else []
            chain = [text[-1], *known[:count]]
            missing = 1 + count - len(chain)
            if missing:
                chain += self._fill_tokens(text, chain[1:], missing)
            chains.append(chain)
        self._last = Draft.chains(rows, chains, device=view.device)
        return self._last

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Keeps the target's choices behind the accepted tokens: they are the next guess."""
        if draft is not self._last:
            return
        choices, first = acceptance.read_node_choice(output), 0
        accepted = acceptance.read_num_accepted()
        for row, count, num_accepted in zip(draft.host_rows(), draft.counts, accepted):
            state = self._rows.get(row)
            if state is not None:  # the choices behind the next token
                state.guess = choices[first + num_accepted + 1 : first + count]
                state.start = view.length(row)
            first += count

    def release(self, rows: Sequence[int]) -> None:
        """Forgets the guesses of these rows."""
        for row in rows:
            self._rows.pop(row, None)

    def _guess_length(self, generated: int, limit: int) -> int:
        """Number of guessed tokens, such that the choice after the last one stays inside block and horizon."""
        if self.block is not None:
            limit = min(limit, self.block - generated % self.block - 1)
        if self.horizon is not None:
            limit = min(limit, self.horizon - generated - 1)
        return max(limit, 0)

    def _fill_tokens(self, text: Sequence[int], known: Sequence[int], count: int) -> Sequence[int]:
        """Tokens for the part of a guess for which no choice is known."""
        if callable(self.fill):
            return list(self.fill([*text, *known], count))[:count]
        return [text[-1] if self.fill is None else self.fill] * count


DRAFTER = JacobiDrafter

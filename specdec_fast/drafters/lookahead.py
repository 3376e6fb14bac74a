"""Lookahead decoding: a Jacobi window generates n-grams, and a pool of them drafts (Fu et al. 2024).

Needs no model and no training. Window and guesses share one tree. The nodes of the window are score-only nodes: the
target scores them and no rule accepts them; the parents array is the attention mask. Every rule that takes trees works.
If the rule reports the target's choice at every node (`replay`, `greedy`), the window follows the choices and sees the
noise of the text. Otherwise it follows the arg-max of the logits, as published for sampling.
Tests: tests/drafters/test_lookahead.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput

GOLDEN = 0.6180339887498949


@dataclass(slots=True)
class _Row:
    """State of one row.

    Attributes:
        rows: Rows of the window. Column 0 of row 0 is the place of the root and has no meaning.
        pool: First token -> n-grams that begin with it, the newest last.
        indexed: Committed tokens whose n-grams are in the pool.
    """

    rows: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    indexed: int = 0


class LookaheadDrafter:
    """Drafts n-grams that a Jacobi window has generated.

    A step scores up to (W + G)(N - 1) nodes. If the budget is short, guesses go first, and the window gets as many
    columns as fit.

    Args:
        window: Columns W of the window, at least 1.
        ngram: Length N of the n-grams, at least 2. The window has N - 1 rows and a guess has N - 1 tokens. N = 2 is
            Jacobi decoding with a pool.
        guesses: N-grams G that are kept, and verified, for each first token. The least recently seen one is dropped
            first.
        pool_from_prompt: N-grams of the prompt and of the text enter the pool too.
        num_draft_tokens: Default budget per row. None: all nodes of window and guesses.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Fu et al. 2024, sections 3.1 to 3.3.
    """

    name = "lookahead"
    needs = Needs(topology="tree", host_tokens=True, node_choices=True)

    def __init__(
        self,
        window: int = 7,
        ngram: int = 5,
        guesses: int = 7,
        pool_from_prompt: bool = True,
        num_draft_tokens: int | None = None,
    ) -> None:
        for what, got, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 0)):
            if not isinstance(got, int) or isinstance(got, bool) or got < least:
                raise ValueError(f"lookahead {what}: got {got!r}; expected a whole number of at least {least}")
        if num_draft_tokens is not None and num_draft_tokens < 1:
            raise ValueError(f"lookahead num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.pool_from_prompt = pool_from_prompt
        self.num_draft_tokens = num_draft_tokens or max(1, (window + guesses) * (ngram - 1) - 1)
        self._rows: dict[int, _Row] = {}
        # the last draft, and the first score-only node and the window's columns of each row in it
        self._last: tuple[Draft | None, dict[int, tuple[int, int]]] = (None, {})

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Starts every window with tokens spread over the row's prompt."""
        for row in rows:
            text = view.tokens(row)
            width = self.window + self.ngram - 2  # every row that is filled loses a column
            spread = [text[int(at * GOLDEN % 1 * len(text))] for at in range(1, width + 1)]
            self._rows[row] = _Row([spread])

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Drafts the pool's n-grams that begin with the root, and the window as score-only nodes."""
        trees: list[tuple[list[int], list[int]]] = []
        score_only: list[bool] = []
        windows: dict[int, tuple[int, int]] = {}
        for row, limit in zip(rows, budget.nodes):
            text, state = view.tokens(row), self._rows[row]
            if self.pool_from_prompt:
                self._index_text(state, text)
            tokens, parents = self._guess_tree(state, text[-1], limit)
            first = len(tokens)
            # column 0 of row 0 is the root, which is a node already
            columns = min(len(state.rows[0]), (limit + 2 - first) // len(state.rows)) if limit else 0
            if columns > 0:
                windows[row] = (first, columns)
                _add_window(state.rows, columns, tokens, parents)
            score_only += [False] * first + [True] * (len(tokens) - first)
            trees.append((tokens, parents))
        draft = Draft.trees(rows, trees, score_only=score_only if any(score_only) else None, device=view.device)
        self._last = (draft, windows)
        return draft

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Moves the windows on by the target's choices, whose n-grams enter the pool."""
        last, windows = self._last
        if draft is not last or not windows:
            return
        choices, start = acceptance.read_node_choice(output), 0
        tokens = draft.tokens[draft.offsets[:-1].long()].tolist()
        for at, (row, count) in enumerate(zip(draft.host_rows(), draft.counts)):
            state = self._rows.get(row)
            if row in windows and state is not None:
                self._advance_window(state, tokens[at], choices[start : start + count], *windows[row])
            start += count

    def release(self, rows: Sequence[int]) -> None:
        """Forgets windows and pools of these rows."""
        for row in rows:
            self._rows.pop(row, None)

    def _index_text(self, state: _Row, text: Sequence[int]) -> None:
        """Adds the n-grams of new committed tokens to the pool."""
        for end in range(max(state.indexed, self.ngram - 1), len(text)):
            self._add_ngram(state, tuple(text[end - self.ngram + 1 : end + 1]))
        state.indexed = len(text)

    def _add_ngram(self, state: _Row, gram: tuple[int, ...]) -> None:
        """Adds an n-gram to the pool, or makes it the newest one."""
        known = state.pool.setdefault(gram[0], {})
        known.pop(gram[1:], None)
        known[gram[1:]] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]

    def _guess_tree(self, state: _Row, root: int, limit: int) -> tuple[list[int], list[int]]:
        """Builds a tree of the pool's n-grams that begin with the root, newest first; equal prefixes share nodes."""
        tokens, parents = [root], [-1]
        children: dict[tuple[int, int], int] = {}
        for guess in reversed(state.pool.get(root, {})):
            node = 0
            for token in guess:
                below = children.get((node, token))
                if below is None:
                    if len(tokens) > limit:
                        return tokens, parents
                    below = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = below
        return tokens, parents

    def _advance_window(self, state: _Row, root: int, choices: list[int], first: int, columns: int) -> None:
        """Collects n-grams and moves the window one position on, by the target's choices at the row's nodes."""
        rows = state.rows
        height = len(rows)
        if height == 1:
            ends = [0, *range(first, first + columns - 1)]
        else:
            ends = list(range(first + height * columns - 1 - columns, first + height * columns - 1))
        fresh = [choices[node] for node in ends] + rows[-1][columns:]
        if height < self.ngram - 1:
            state.rows = [row[1:] for row in (*rows, fresh)]
            return
        for column in range(columns):
            key = rows[0][column] if column else root
            self._add_ngram(state, (key, *(row[column] for row in rows[1:]), fresh[column]))
        state.rows = [*rows[1:], fresh]


def _add_window(rows: list[list[int]], columns: int, tokens: list[int], parents: list[int]) -> None:
    """Appends the window's nodes: row 0 is a chain from the root, and each column of the other rows hangs below it."""
    base = len(tokens) - 1  # node of row 0, column i > 0
    tokens += rows[0][1:columns]
    parents += [0, *range(base + 1, base + columns - 1)][: columns - 1]
    above = [0, *range(base + 1, base + columns)]
    for row in rows[1:]:
        here = range(len(tokens), len(tokens) + columns)
        tokens += row[:columns]
        parents += above
        above = list(here)


DRAFTER = LookaheadDrafter

"""A grammar over token ids in plain Python: a finite automaton that checks its use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


class ToyMatcher:
    """A matcher. moves: state -> token -> next state; complete: states in which the text may end. It starts in state 0.

    `advance` and `rollback` are counted, and rolling back more than was advanced is an error.
    """

    def __init__(
        self, moves: Mapping[int, Mapping[int, int]], complete: Sequence[int], vocab_size: int, start: int = 0
    ) -> None:
        self.moves, self.ends, self.vocab_size = moves, tuple(complete), vocab_size
        self.states = [start]

    @property
    def complete(self) -> bool:
        return self.states[-1] in self.ends

    def fork(self) -> ToyMatcher:
        return type(self)(self.moves, self.ends, self.vocab_size, self.states[-1])

    def advance(self, token: int) -> bool:
        following = self.moves[self.states[-1]].get(token)
        if following is None:
            return False
        self.states.append(following)
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.states):
            raise IndexError(f"rollback of {count} after {len(self.states) - 1} advances")
        del self.states[len(self.states) - count :]

    def fill_mask(self, words: Tensor) -> None:
        assert words.shape == (-(-self.vocab_size // 32),)
        bits = [0] * len(words)
        for token in self.moves[self.states[-1]]:
            bits[token // 32] |= 1 << token % 32
        for at, word in enumerate(bits):
            words[at] = word - 2**32 if word >= 2**31 else word

    def follows(self, text: Sequence[int]) -> tuple[set[int], bool]:
        """For oracles: returns which tokens may follow a text, and whether it may end, without this object's state."""
        state = 0
        for token in text:
            state = self.moves[state][token]
        return set(self.moves[state]), state in self.ends


def counting(vocab: int, period: int = 3) -> ToyMatcher:
    """Token t may follow at place i iff t + i is not a multiple of `period`; complete at every third place."""
    cycle = 3 * period
    moves = {i: {t: (i + 1) % cycle for t in range(vocab) if (t + i) % period} for i in range(cycle)}
    return ToyMatcher(moves, [i for i in range(cycle) if i % 3 == 0 and i], vocab)

"""What a terminal shows: text coloured by origin, statistics; in pipes, the same without escape codes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from specdec_fast.request import Handle

# Hue and shape differ, so that nobody depends on telling red from green.
STYLES = {"accepted": "green", "recovered": "red underline", "bonus": "bold bright_blue", "plain": ""}
MEANINGS = {
    "accepted": "drafted, and the target agreed",
    "recovered": "the draft was wrong here: the target's own token",
    "bonus": "all drafts agreed: one more from the target, free",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints no escape code when it is not a terminal or when NO_COLOR is set."""
    from rich.console import Console

    colours = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, color_system=colours)  # type: ignore[arg-type]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def harmless(text: str) -> str:
    """Text with control characters made visible: a model must not steer the terminal."""
    return _CONTROL.sub("\ufffd", text)


class Painter:
    """Splits the growing text of a request into pieces by the origin of their tokens.

    Without a tokenizer the pieces are token ids.
    """

    def __init__(self, handle: Handle, tokenizer: Any) -> None:
        from specdec_fast.stopping import TextStream

        self._handle = handle
        self._stream = TextStream(tokenizer, handle.prompt) if tokenizer is not None else None
        self._seen = 0
        self._shown = 0
        self._ends: list[tuple[int, str]] = []  # where the text of each token ends, and its origin
        self._length = 0

    def fresh(self) -> list[tuple[str, str]]:
        """(text, origin) of what became final since the last call."""
        handle = self._handle
        new = handle.tokens[self._seen :]
        origins = handle.origins[self._seen : self._seen + len(new)]
        first = self._seen == 0
        self._seen += len(new)
        if self._stream is None:
            pieces = [(f" {token}", origin) for token, origin in zip(new, origins, strict=True)]
            if pieces and first:
                pieces[0] = (pieces[0][0].lstrip(), pieces[0][1])
            return pieces
        for token, origin in zip(new, origins, strict=True):
            self._length += len(self._stream.push(token))
            self._ends.append((self._length, origin))
        checker = handle.checker
        assert checker is not None
        return self._cut(checker.text, checker.released)

    def _cut(self, text: str, limit: int) -> list[tuple[str, str]]:
        pieces = []
        for end, origin in self._ends:
            stop = min(end, limit)
            if stop > self._shown:
                pieces.append((text[self._shown : stop], origin))
                self._shown = stop
        if self._shown < limit and self._handle.finished:  # half a character that the end released
            pieces.append((text[self._shown : limit], self._ends[-1][1] if self._ends else "plain"))
            self._shown = limit
        self._ends = [entry for entry in self._ends if entry[0] > self._shown] or self._ends[-1:]
        return pieces


def paint(pieces: Iterable[tuple[str, str]]) -> Text:
    """Pieces as coloured text."""
    from rich.text import Text

    text = Text()
    for piece, origin in pieces:
        text.append(harmless(piece), STYLES[origin])
    return text


def legend() -> Text:
    """What the colours mean, one per line."""
    from rich.text import Text

    lines = [
        Text.assemble((f"{name:<9}", STYLES[name]), (f"  {words}", "dim")) for name, words in MEANINGS.items()
    ]
    return Text("\n").join(lines)


def stats_table(stats: Any, seconds: float) -> Any:
    """tau, alpha per position and time per verb of `RequestStats` as a small table; seconds: wall-clock."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    speed = stats.new_tokens / seconds if seconds else 0.0
    table.add_row("tokens", f"{stats.new_tokens} in {seconds:.2f} s: {speed:.1f} tokens/s")
    table.add_row(
        "tau",
        f"{stats.tau:.2f} tokens per target pass ({stats.steps} passes, {stats.drafted} tokens drafted)",
    )
    if stats.tested:
        by_position = "  ".join(f"{at}: {rate:.2f}" for at, rate in enumerate(stats.alpha, 1))
        table.add_row(
            "alpha", f"{stats.mean_alpha:.2f} of tested draft tokens accepted; by position  {by_position}"
        )
    total = sum(stats.seconds.values())
    by_verb = "  ".join(
        f"{verb} {share / total:.0%}" for verb, share in stats.seconds.items() if share >= total / 200
    )
    table.add_row("time", by_verb if total else "none")
    return table

"""Terminal output: text coloured by origin and tables of statistics, without escape codes in a pipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specdec_fast.commands.word_wrap import wrap_words

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from specdec_fast.engine.request import Handle
    from specdec_fast.sampling.logprobs import TokenLogprob

# Styles differ in hue and shape, for readers who cannot distinguish red from green.
STYLES = {"accepted": "green", "recovered": "red underline", "bonus": "bold bright_blue", "plain": ""}
MEANINGS = {
    "accepted": "drafted, and the target agreed",
    "recovered": "the draft was rejected: the target's own token",
    "bonus": "the whole draft was accepted: one more token from the same target pass",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """A console that strips trailing blanks of tables in a pipe.

    With `soft_wrap`, text is not broken inside a word: a terminal gets line breaks between words, a pipe gets none.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if options.get("soft_wrap") and "end" not in options:
            objects = tuple(wrap_words(each, self.file) if isinstance(each, str) else each for each in objects)
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))
        self.file.flush()


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percents(parts: Sequence[float]) -> list[int]:
    """Returns shares in whole percent that add up to 100: rounded down, but up for the largest remainders."""
    exact = [100 * part / sum(parts) for part in parts]
    found = [int(share) for share in exact]
    for at in sorted(range(len(parts)), key=lambda at: found[at] - exact[at])[: 100 - sum(found)]:
        found[at] += 1
    return found


def make_console(*, stderr: bool = False) -> Console:
    """Returns a console without escape codes if it is not a terminal or NO_COLOR is set."""
    colours = None if os.environ.get("NO_COLOR") else "auto"
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False, color_system=colours)  # type: ignore[arg-type]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def print_table(console: Console, table: Table) -> None:
    """Prints a table, or one block per row where its columns are too narrow for their words.

    Args:
        console: The output.
        table: A table whose first column names the row. A blank name continues the row above.
    """
    from rich.text import Text

    rendered = "\n".join("".join(part.text for part in line) for line in console.render_lines(table))
    shown = set(rendered.split())
    cells = [cell for column in table.columns for cell in (column.header, *column.cells, column.footer)]
    if all(word in shown for cell in cells for word in str(cell).split()):
        console.print(table)
        return
    first, *others = [[*column.cells, *([column.footer] if table.show_footer else [])] for column in table.columns]
    titles = [str(column.header).replace("\n", " ") for column in table.columns[1:]]
    wide = max(map(len, titles))
    for name, *cells in zip(first, *others, strict=True):
        if str(name):
            console.print()
            console.print(Text(str(name), "bold"))
        for title, cell in zip(titles, cells, strict=True):
            if str(cell):
                line = Text(wrap_words(f"  {title:<{wide}}  {cell}", console.file, min(wide + 4, 18), table=True))
                line.stylize("dim", 0, wide + 2)
                console.print(line, soft_wrap=True)


def harmless(text: str) -> str:
    """Makes control characters visible, so that generated text cannot control the terminal."""
    return _CONTROL.sub("\ufffd", text)


class Painter:
    """Splits the growing text of a request into pieces, optionally by the origin of their tokens.

    Args:
        handle: The request.
        tokenizer: Its tokenizer. None: the pieces are token ids.
        by_origin: Whether to start a new piece for every token, with its origin.
    """

    def __init__(self, handle: Handle, tokenizer: Any, *, by_origin: bool = True) -> None:
        from specdec_fast.engine.text_stream import TextStream

        self._handle, self._by_origin = handle, by_origin
        skips = handle.params.skip_special_tokens
        self._stream = TextStream(tokenizer, handle.prompt, skips) if tokenizer is not None else None
        self._seen = 0  # tokens that were read
        self._shown = 0  # characters that were returned
        self._length = 0  # characters of the tokens that were read
        self._ends: list[tuple[int, str]] = []  # where the text of each token ends, and its origin

    def fresh(self) -> list[tuple[str, str]]:
        """Returns (text, origin) of all pieces that became final since the last call."""
        start, new = self._seen, self._handle.tokens[self._seen :]
        self._seen += len(new)
        origins = self._handle.origins[start : self._seen]
        if self._stream is None:
            space = " " if start else ""
            return [(f"{' ' if at else space}{token}", origins[at]) for at, token in enumerate(new)]
        if self._by_origin:
            for token, origin in zip(new, origins, strict=True):
                self._stream.push(token)
                self._length += len(self._stream.flush())
                self._ends.append((self._length, origin))
        checker = self._handle.checker
        return [] if checker is None else self._cut(checker.text, checker.released)

    def _cut(self, text: str, limit: int) -> list[tuple[str, str]]:
        pieces = []
        for end, origin in self._ends:
            stop = min(end, limit)
            if stop > self._shown:
                pieces.append((text[self._shown : stop], origin))
                self._shown = stop
        if self._shown < limit and (self._handle.finished or not self._by_origin):
            # everything without origins; with origins, an incomplete character at the end of the text
            pieces.append((text[self._shown : limit], self._ends[-1][1] if self._ends else "plain"))
            self._shown = limit
        self._ends = [entry for entry in self._ends if entry[0] > self._shown] or self._ends[-1:]
        return pieces


def paint(pieces: Iterable[tuple[str, str]]) -> Text:
    """Returns pieces as coloured text."""
    from rich.text import Text

    text = Text()
    for piece, origin in pieces:
        text.append(harmless(piece), STYLES[origin])
    return text


def write_pieces(console: Console, pieces: Sequence[tuple[str, str]], *, color: bool) -> None:
    """Writes pieces of text at once, as `Painter.fresh` returns them.

    Args:
        console: The output. Control characters are only replaced in a terminal.
        pieces: Text and origin of each piece.
        color: Whether to colour them by origin.
    """
    if color:
        console.print(paint(pieces), end="", soft_wrap=True)
    else:
        text = "".join(piece for piece, _ in pieces)
        console.file.write(harmless(text) if console.is_terminal else text)
    console.file.flush()


def legend() -> Text:
    """Lists the meaning of the colours, one per line."""
    from rich.text import Text

    lines = [Text.assemble((f"{name:<9}", STYLES[name]), (f"  {words}", "dim")) for name, words in MEANINGS.items()]
    return Text("\n").join(lines)


def stats_table(stats: Any, seconds: float) -> Any:
    """Formats tau, acceptance by depth and the time of each phase of `RequestStats` as a table."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    speed = stats.new_tokens / seconds if seconds else 0.0
    table.add_row("tokens", f"{stats.new_tokens} in {seconds:.2f} s: {speed:.1f} tokens/s")
    table.add_row(
        "tau",
        f"{stats.tau:.2f} tokens per target pass ({stats.steps} pass{'' if stats.steps == 1 else 'es'}, "
        f"{stats.num_draft_tokens} tokens drafted)",
    )
    if stats.tested:
        table.add_row("alpha", f"{stats.alpha:.2f} of tested draft tokens accepted")
        table.add_row("by depth", " ".join(f"{rate:.2f}" for rate in stats.alpha_per_position))
    seconds_of = {verb: share for verb, share in stats.seconds.items() if share > 0}
    by_verb = zip(seconds_of, percents(list(seconds_of.values())), strict=True)
    table.add_row("time", "  ".join(f"{verb} {share}%" for verb, share in by_verb if share) or "none")
    return table


def logprobs_table(logprobs: Sequence[TokenLogprob], tokenizer: Any) -> Any:
    """Formats tokens with their log-probabilities and alternatives, one token per line."""
    from rich.table import Table
    from rich.text import Text

    def name(token: int) -> str:
        return str(token) if tokenizer is None else f"{token} {harmless(repr(tokenizer.decode([token])))}"

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("token", "log-probability", "likeliest"):
        table.add_column(title)
    for each in logprobs:
        others = "  ".join(f"{name(token)} {logprob:.3f}" for token, logprob in each.top)
        table.add_row(Text(name(each.token)), f"{each.logprob:.3f}", Text(others, "dim"))
    return table

"""A chat in a terminal or over pipes: reads questions, streams answers. Tests: tests/commands/test_chat.py."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec_fast.commands.error_wording import in_flags
from specdec_fast.commands.terminal_output import Painter, counted, legend, make_console, stats_table, write_pieces
from specdec_fast.commands.warning_lines import warnings_after_text
from specdec_fast.commands.word_wrap import wrap_words

if TYPE_CHECKING:
    from specdec_fast.commands.conversation import Conversation
    from specdec_fast.engine.engine import Engine
    from specdec_fast.engine.request import Handle
    from specdec_fast.sampling.params import SamplingParams

HELP = """\
/stats         speed, acceptance and context so far
/reset         forget all turns, but not the system message
/undo          forget the last turn
/system TEXT   set the system message; "" removes it, no text shows it
/help          this list
/exit          leave, as Ctrl-D does
Ctrl-C ends an answer. Its text so far stays in the chat.
A line that ends in \\ continues on the next; // begins a question with /."""
_PROMPT, _CONTINUED = "> ", ". "


@dataclass(frozen=True, slots=True)
class Output:
    """How a chat is shown.

    Attributes:
        color: Colour tokens by origin if the output is a terminal.
        stats: Print statistics after every answer.
        as_json: Print a line of JSON for every answer in place of its text.
    """

    color: bool = False
    stats: bool = False
    as_json: bool = False


class ChatSession:
    """Reads questions from standard input until its end.

    Args:
        engine: The engine.
        conversation: The history, which may have turns.
        params: Sampling parameters. With a seed, each question after the first uses the next number.
        output: How answers are shown.

    Attributes:
        interactive: Whether standard input is a terminal.
        refused: Number of questions and commands that were refused.
    """

    def __init__(self, engine: Engine, conversation: Conversation, params: SamplingParams, output: Output) -> None:
        from specdec_fast.engine.stats import RequestStats

        self.refused = 0
        self._engine, self._conversation, self._params = engine, conversation, params
        self._out, self._err = make_console(), make_console(stderr=True)
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self._on_terminal = self.interactive and sys.stdout is not None and sys.stdout.isatty()
        self._color = output.color and self._out.is_terminal and not output.as_json
        self._output = output
        self._stats, self._seconds = RequestStats(), 0.0
        self._num_asked = self._context = 0
        self._contexts: list[int] = []  # tokens of the context after each turn that is kept

    def greet(self, model: str) -> None:
        """Prints a line about the model and the commands, in a terminal."""
        if self.interactive:
            engine = self._engine
            drafter = "no drafter" if engine.drafter is None else f"drafter {engine.drafter.name}"
            context = f"{engine.state.max_length:,} tokens of context"
            self._err.print(f"{model}, {drafter}, {context}. /help lists commands, Ctrl-D leaves.", soft_wrap=True)
            if self._color:
                self._err.print(legend())
            self._err.print()

    def run(self) -> None:
        """Serves questions and commands until the input ends, or until `/exit`.

        Raises:
            KeyboardInterrupt: On Ctrl-C, if standard input is no terminal.
            ValueError: If standard input is closed, or has bytes that are no text.
        """
        if sys.stdin is None:
            raise ValueError("standard input: got none; expected questions, one a line; do not close it")
        if self._on_terminal:
            with suppress(ImportError):  # arrow keys and history; Windows has none of it
                import readline  # noqa: F401
        while True:
            try:
                line = self._read()
                if line is None or not self._serve(line):
                    return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._err.print()
                self._say("Ctrl-D or /exit leaves")

    # -- input ------------------------------------------------------------------------------------------------------

    def _read(self) -> str | None:
        """Returns the next line, which may have several in a terminal; None at the end of the input."""
        try:
            line = self._read_line(_PROMPT)
            while self.interactive and line.endswith("\\"):
                line = line[:-1] + "\n" + self._read_line(_CONTINUED)
        except EOFError:
            if self.interactive:
                self._err.print()
            return None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"standard input: got bytes that are not {error.encoding} text (byte {error.start}); expected "
                "questions, one a line; convert it first"
            ) from None
        return line

    def _read_line(self, prompt: str) -> str:
        """Reads a line. The prompt is only shown in a terminal, and never in redirected output."""
        if self._on_terminal:
            if _has_ended(sys.stdin.fileno()):
                raise EOFError
            return input(prompt)
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        binary = getattr(sys.stdin, "buffer", None)  # strict decoding, which some locales do not use
        line = sys.stdin.readline() if binary is None else str(binary.readline(), sys.stdin.encoding)
        if not line:
            raise EOFError
        return line.removeprefix("\ufeff").rstrip("\r\n")

    def _serve(self, line: str) -> bool:
        """Serves a question or a command. Returns whether the chat goes on."""
        name, _, argument = line.partition(" ")
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._ask(line.removeprefix("/"))
        elif name == "/exit":
            return False
        else:
            self._command(name, argument.strip())
        return True

    # -- commands ---------------------------------------------------------------------------------------------------

    def _command(self, name: str, argument: str) -> None:
        """Serves a command."""
        turns = self._conversation.turns
        if name == "/system":
            self._set_system(argument)
        elif argument or name not in ("/stats", "/reset", "/undo", "/help"):
            wrong = f"got {name!r} with a text" if argument else f"got {name!r}"
            self._refuse(f"{wrong}; expected /stats, /reset, /undo, /system TEXT, /help or /exit; // begins a question")
        elif name == "/stats":
            self._print_stats(self._stats, self._seconds)
        elif name == "/reset":
            self._say(f"{counted(len(turns), 'turn')} forgotten")
            turns.clear()
            self._contexts.clear()
            self._context = 0
        elif name == "/undo":
            self._say("the last turn is forgotten" if turns else "there is no turn to forget")
            del turns[-1:], self._contexts[-1:]
            self._context = self._contexts[-1] if turns else 0
        else:
            self._err.print(wrap_words(HELP, self._err.file, indent=15), soft_wrap=True)

    def _set_system(self, text: str) -> None:
        if not text:
            current = self._conversation.system
            self._say("no system message" if current is None else f"system message: {current}")
            return
        try:
            self._conversation.system = None if text == '""' else text
        except ValueError as error:
            self._refuse(in_flags(error))
            return
        self._say("the system message applies from the next answer on")

    def _print_stats(self, stats: Any, seconds: float) -> None:
        table = stats_table(stats, seconds)
        turns = counted(len(self._conversation.turns), "turn")
        table.add_row("context", f"{self._context} of {self._engine.state.max_length} tokens; {turns}")
        self._err.print(table)

    def _say(self, words: str) -> None:
        if self.interactive:
            self._err.print(f"({words})", style="dim", soft_wrap=True)
        else:
            self._err.print(f"specdec: note: {words}", soft_wrap=True)

    def _refuse(self, words: str) -> None:
        self.refused += 1
        self._err.print(f"specdec: error: {words}", soft_wrap=True)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        """Streams the answer to a question, and adds both to the history."""
        seed = None if self._params.seed is None else self._params.seed + self._num_asked
        self._num_asked += 1
        try:
            handle, dropped = self._conversation.submit(question, replace(self._params, seed=seed))
        except ValueError as error:
            words = in_flags(error)
            self._refuse(words)
            if self._output.as_json:
                self._print_json({"question": question, "text": "", "finish_reason": "error", "error": words})
            return
        if dropped:
            limit = self._engine.state.max_length
            self._say(f"the context of {limit} tokens is full; {counted(dropped, 'old turn')} forgotten")
        start = perf_counter()
        try:
            self._stream(handle)
        finally:
            seconds = perf_counter() - start
            self._context = len(handle.prompt) + len(handle.tokens)
            self._stats.merge(handle.stats)
            self._seconds += seconds
        if handle.error is None and (handle.tokens or handle.finish_reason != "cancelled"):
            self._conversation.keep(question, handle.text)
            self._contexts.append(self._context)
        self._report(question, handle, dropped, seconds)
        if handle.finish_reason == "cancelled" and not self.interactive:
            raise KeyboardInterrupt

    def _stream(self, handle: Handle) -> None:
        """Prints an answer while it grows. Ctrl-C ends it."""
        painter = Painter(handle, self._engine.tokenizer, by_origin=self._color)
        with warnings_after_text():
            try:
                while not handle.finished:
                    self._engine.step()
                    self._show(painter)
            except KeyboardInterrupt:
                pass
            finally:
                self._engine.cancel(handle)
            self._show(painter)
            if not self._output.as_json:
                self._out.print()

    def _show(self, painter: Painter) -> None:
        if not self._output.as_json:
            write_pieces(self._out, painter.fresh(), color=self._color)

    def _report(self, question: str, handle: Handle, dropped: int, seconds: float) -> None:
        """Prints what there is to say about an answer besides its text."""
        if self._output.as_json:
            self._print_json(
                {
                    "question": question,
                    **handle.as_dict(),
                    "prompt_tokens": len(handle.prompt),
                    "dropped_turns": dropped,
                    "seconds": seconds,
                    "tokens_per_s": len(handle.tokens) / seconds if seconds else 0.0,
                }
            )
        if handle.error is not None:
            self._refuse(in_flags(handle.error))
        elif (words := self._how_it_ended(handle)) is not None:
            self._say(words)
        if self._output.stats:
            self._print_stats(handle.stats, seconds)
        if self.interactive:
            self._err.print()

    def _how_it_ended(self, handle: Handle) -> str | None:
        """Returns a note about an answer that is empty or incomplete, or None."""
        if handle.finish_reason == "cancelled":
            if not handle.tokens:
                return "interrupted before the first token; the question is forgotten"
            kept = "the text so far stays in the chat; /undo forgets it"
            return f"interrupted after {counted(len(handle.tokens), 'token')}; {kept}"
        if handle.finish_reason == "length":
            if self._context >= self._engine.state.max_length:
                return f"the context of {self._context} tokens is full, so the answer is cut; /reset begins anew"
            return f"the answer is cut after {counted(len(handle.tokens), 'token')}, as --max-new-tokens says"
        return None if handle.text.strip() else "the model answers nothing"

    def _print_json(self, value: dict[str, Any]) -> None:
        print(json.dumps({"turn": self._num_asked, **value}, ensure_ascii=False), flush=True)


def _has_ended(terminal: int) -> bool:
    """Takes a Ctrl-D that was typed during an answer, and returns whether there was one: readline would drop it."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return False
    if not select.select([terminal], [], [], 0)[0]:
        return False
    waiting = int.from_bytes(fcntl.ioctl(terminal, termios.FIONREAD, bytes(4)), sys.byteorder)
    return waiting == 0 and os.read(terminal, 1) == b""

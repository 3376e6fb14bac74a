"""The program `specdec`: its commands, errors as messages, exit codes.

Nothing heavy is imported before a command runs, so `specdec --help` stays fast. Exit codes: 0 done, 1 the
reader of a pipe went away, the lab rejected a distribution or a tuner found no gain, 2 bad input (one message on
stderr, no traceback), 130 interrupted (a server: twice).
Tests: tests/commands/.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from specdec_fast import __version__
from specdec_fast.commands.chat import chat
from specdec_fast.commands.demo import demo
from specdec_fast.commands.drafters import drafters
from specdec_fast.commands.error_wording import NAMED, REMEDIES, explain_value, in_flags
from specdec_fast.commands.generate import generate
from specdec_fast.commands.help_layout import lay_out_help
from specdec_fast.commands.info import info
from specdec_fast.commands.lab import lab
from specdec_fast.commands.serve import serve
from specdec_fast.commands.word_wrap import wrap_words
from specdec_fast.core.remedies import stated

# Applications of other modules, imported only when they run: name -> (module with `app`, line of help).
MOUNTED = {
    "datastore": ("specdec_fast.commands.datastore", "Build and inspect datastores for the drafter `rest`."),
    "kernels": ("specdec_fast.commands.kernels", "List, check, inspect and time operators and their backends."),
    "train": ("specdec_fast.train.command", "Train heads for any model, or the bundled pair."),
    "tune": ("specdec_fast.commands.tune_layers", "Tune layers, trees and heads of a drafter by measurement."),
}

_OUTPUT = "standard output"

_OWN_FLAGS = {
    "num_draft_tokens": "--draft-tokens",
    "target": "--model",
    "banned_token_ids": "--ban",
    "bad_words": "--bad-word",
}
"""Arguments whose flag has another name."""


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = stated(error, REMEDIES)
    return in_flags(error) if message.startswith(NAMED) else message or type(error).__name__


@contextmanager
def _named_output() -> Iterator[None]:
    """Names standard output in errors about it, such as a full device."""
    stream = sys.stdout
    if stream is None:  # it was closed
        yield
        return

    def naming(call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any) -> Any:
            try:
                return call(*args)
            except OSError as error:
                error.filename = error.filename or _OUTPUT
                raise

        return named

    for name in ("write", "flush"):
        setattr(stream, name, naming(getattr(stream, name)))
    try:
        yield
    finally:
        for name in ("write", "flush"):
            delattr(stream, name)


def _complain(error: Exception) -> None:
    print(wrap_words(f"specdec: error: {_explain(error)}", sys.stderr), file=sys.stderr)


def _is_usage_error(error: Exception) -> bool:
    """Whether an error is about the command line: of click, or of the copy that typer brings."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "UsageError" in kinds and "NoArgsIsHelpError" not in kinds  # which shows the help


def _refuse_usage(error: Any) -> NoReturn:
    """Prints an error about the command line in the form of all others, and ends the program."""
    if type(error).__name__ == "NoSuchOption":
        _hint_at_option(error)
    command = getattr(getattr(error, "ctx", None), "command_path", "specdec")
    _complain(ValueError(f"{error.format_message().rstrip('.')}; see `{command} --help`"))
    raise typer.Exit(2) from None


def _hint_at_option(error: Any) -> None:
    """Adds our name of an unknown option to the error, if another engine or an earlier version uses that name."""
    from specdec_fast.core.former_names import FOREIGN_ARGUMENTS, RENAMED_ARGUMENTS

    name = error.option_name.lstrip("-").replace("-", "_")
    theirs = {old: ours for table in FOREIGN_ARGUMENTS.values() for old, ours in table.items()}
    ours = RENAMED_ARGUMENTS.get(name) or theirs.get(name, "")
    flag = _OWN_FLAGS.get(ours, f"--{ours.replace('_', '-')}")
    known = [] if error.ctx is None else [each for option in error.ctx.command.params for each in option.opts]
    if flag in known:
        words = (
            f"{error.option_name} is now called {flag}" if name in RENAMED_ARGUMENTS else f"specdec calls this {flag}"
        )
        error.message, error.possibilities = f"No such option: {error.option_name}; {words}", None


def _drop_output() -> None:
    """Redirects stdout to the null device, so that the last flush of the interpreter cannot fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: Any) -> None:
    """Handles Ctrl-C.

    During the import of torch it ends the program at once, because an exception inside a C++ initialiser aborts.
    """
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os.write(2, b"specdec: interrupted\n")
        os._exit(130)
    signal.default_int_handler(number, frame)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Installs `_interrupt` for Ctrl-C, unless the parent process has changed how the signal is handled."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Root(TyperGroup):
    """The root command: lists mounted applications and turns errors into messages and exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Adds the commands of modules that are installed."""
        present = [name for name, (module, _) in MOUNTED.items() if _is_there(module)]
        return [*super().list_commands(ctx), *present]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command; one of a mounted module is imported when it runs."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in MOUNTED and _is_there(MOUNTED[cmd_name][0]):
            return _Deferred(cmd_name)
        return found and lay_out_help(found, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help, with names for the values of options."""
        lay_out_help(self, ctx)
        super().format_help(ctx, formatter)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parses the options before the name of a command."""
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except Exception as error:
            if not _is_usage_error(error):
                raise
            _refuse_usage(error)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command, and ends it quietly on Ctrl-C or a closed pipe."""
        try:
            with _interruptible(), _named_output():
                result = super().invoke(ctx)
                if sys.stdout is not None:
                    sys.stdout.flush()
            return result
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("specdec: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except Exception as error:
            if (words := explain_value(error)) is not None:
                _complain(ValueError(words))
                raise typer.Exit(2) from None
            if _is_usage_error(error):
                _refuse_usage(error)
            if not isinstance(error, (ValueError, OSError)):
                raise
            if ctx.params.get("debug"):
                raise
            _complain(error)
            if getattr(error, "filename", None) == _OUTPUT:
                _drop_output()
            raise typer.Exit(2) from None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def mounted(name: str, context: Any) -> TyperGroup:
    """Imports a mounted application and returns its group of commands, with names for the values of options."""
    group: TyperGroup = lay_out_help(typer.main.get_group(import_module(MOUNTED[name][0]).app), context)
    return group


class _Deferred(TyperGroup):
    """A mounted application in the list of commands, imported only when it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, help=MOUNTED[name][1])

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return mounted(str(self.name), parent).make_context(info_name, args, parent=parent, **extra)


main = typer.Typer(
    name="specdec",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec-fast {__version__}")
        raise typer.Exit


@main.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback instead of a one-line error.")] = False,
) -> None:
    """Lossless speculative decoding: the target model's text, faster, with tools that check it."""


main.command()(chat)
main.command()(demo)
main.command()(drafters)
main.command()(generate)
main.command()(info)
main.command()(lab)
main.command()(serve)

if __name__ == "__main__":
    main()

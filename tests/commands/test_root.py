"""The program itself: help, version, mounted applications, errors as messages, pipes and interrupts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specdec_fast import __version__, cli
from specdec_fast.core import former_names


def test_version(run: Any) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"specdec-fast {__version__}\n"


def test_help_lists_the_commands(run: Any) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("demo", "generate", "info"):
        assert name in result.stdout


@pytest.mark.parametrize("command", ["demo", "generate", "info"])
def test_help_of_commands(run: Any, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def _words(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the words of a command and of all below it."""
    yield words
    for name in getattr(command, "commands", {}):
        yield from _words(command.commands[name], (*words, name))


def test_help_names_values_and_shows_none_for_flags(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--color <bool>` made readers write `--color true`. This holds for all commands."""
    monkeypatch.setenv("COLUMNS", "200")
    root = typer.main.get_command(cli.main)
    context = root.make_context("specdec", ["info"])
    commands = [
        words
        for name in root.list_commands(context)  # type: ignore[attr-defined]
        for words in _words(cli.mounted(name, context) if name in cli.MOUNTED else None, (name,))
    ]
    assert {("serve",), ("train", "eagle"), ("tune", "layers")} <= set(commands)
    for words in [(), *commands]:
        text = run(*words, "--help").stdout
        assert re.findall(r"<\w+(?:\[\w+\])?>", text) == [], words
    flat = " ".join(run("generate", "--help").stdout.split())
    assert "--color Colour tokens" in flat and "--threads -t N Number of" in flat and "--model,--target -m TEXT" in flat
    assert "--temperature -T NUMBER Sampling" in flat and "prompt TEXT Text to continue" in flat


def test_unknown_option_and_command(run: Any) -> None:
    assert run("info", "--nonsense").exit_code == 2
    assert run("nonsense").exit_code == 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max-tokens", "--max-new-tokens"),
        ("--num-speculative-tokens", "--draft-tokens"),
        ("--assistant-model", "--draft"),
        ("--bad-words-ids", "--bad-word"),
        ("--torch-dtype", "--dtype"),
    ],
)
def test_an_option_of_another_program(run: Any, theirs: str, ours: str) -> None:
    result = run("generate", "x", theirs, "3")
    assert result.exit_code == 2
    assert f"No such option: {theirs}; specdec calls this {ours}; see `" in " ".join(result.stderr.split())


def test_an_option_that_another_command_has(run: Any) -> None:
    """What a command cannot do under any name is not promised."""
    result = run("info", "--max-tokens", "3")
    assert result.exit_code == 2 and "No such option: --max-tokens" in result.stderr
    assert "calls this" not in result.stderr


def test_an_option_by_its_former_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(former_names.RENAMED_ARGUMENTS, "former", "num_draft_tokens")
    result = run("generate", "x", "--former", "3")
    assert result.exit_code == 2
    assert "No such option: --former; --former is now called --draft-tokens; see `" in " ".join(result.stderr.split())


def test_mounts_what_is_there(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("specdec_fast_test_mounted")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    app = module.app = typer.Typer()  # type: ignore[attr-defined]
    seen = []

    @app.callback()
    def group() -> None:
        pass

    @app.command()
    def sub(number: int) -> None:
        seen.append(number)
        if number < 0:
            raise ValueError("number: got a negative one; expected 0 or more")

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.MOUNTED, "mounted", (module.__name__, "A mounted application."))
    monkeypatch.setitem(cli.MOUNTED, "absent", ("specdec_fast_test_absent.command", "Not there."))
    listing = run("--help").stdout
    assert "A mounted application." in listing
    assert "absent" not in listing
    assert run("mounted", "sub", "3").exit_code == 0
    assert seen == [3]
    failed = run("mounted", "sub", "--", "-1")
    assert failed.exit_code == 2
    assert failed.stderr == "specdec: error: number: got a negative one; expected 0 or more\n"
    assert run("absent").exit_code == 2


def test_debug_shows_the_exception(run: Any) -> None:
    result = run("--debug", "generate", "--rule", "nonsense", "x")
    assert isinstance(result.exception, ValueError)


def test_help_loads_nothing_heavy(program: Any) -> None:
    process = program("--help", PYTHONPROFILEIMPORTTIME="1")
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0
    loaded = {line.rpartition(b"|")[2].strip() for line in stderr.splitlines()}
    assert not loaded & {b"torch", b"transformers", b"specdec_kernels"}


def test_interrupt_prints_what_there_is(program: Any, pair: list[str]) -> None:
    process = program("generate", "Once", *pair, "--max-new-tokens", "1900", "--ignore-eos", "--seed", "0")
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=180)
    assert process.returncode == 130
    assert first
    assert rest.endswith(b"\n")
    assert b"interrupted after" in stderr
    assert b"Traceback" not in stderr


class _Interrupted(types.ModuleType):
    """A module whose import is interrupted by Ctrl-C."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_before_any_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec_fast.__main__ import run

    monkeypatch.setitem(sys.modules, "specdec_fast.cli", _Interrupted("specdec_fast.cli"))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as left:
            run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 130 and capsys.readouterr().err == "specdec: interrupted\n"


@pytest.mark.parametrize("first", ["raise KeyboardInterrupt", "raise SystemExit(130)"])
def test_a_second_interrupt_while_the_interpreter_ends_has_the_same_status(first: str) -> None:
    """Unhandled, it would end the program by the signal."""
    code = (
        "import atexit, os, signal, sys, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def main():\n"
        "    atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        f"    {first}\n"
        "sys.modules['specdec_fast.cli'] = types.SimpleNamespace(main=main)\n"
        "from specdec_fast.__main__ import run\n"
        "run()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130 and "Traceback" not in ended.stderr


@pytest.mark.parametrize("importing", [True, False])
def test_an_interrupt_while_torch_is_imported_ends_at_once(
    run: Any, monkeypatch: pytest.MonkeyPatch, importing: bool
) -> None:
    def command(_: object) -> None:
        monkeypatch.setattr(sys.modules["torch"].__spec__, "_initializing", importing, raising=False)
        signal.raise_signal(signal.SIGINT)

    def leave(status: int) -> None:
        raise SystemExit(status + 1000)  # what comes behind os._exit is never reached

    monkeypatch.setattr(cli.os, "_exit", leave)
    monkeypatch.setattr(cli.TyperGroup, "invoke", lambda self, context: command(context))
    result = run("info")
    assert result.exit_code == (1130 if importing else 130)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closed_pipe_is_quiet(forked: Any, pair: list[str], tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    process, output = forked(
        "generate", "Once", *pair, "--max-new-tokens", "1900", "--ignore-eos", "--seed", "0", errors=errors
    )
    assert output.read(3)
    output.close()
    process.join(180)
    assert process.exitcode == 1
    assert errors.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_device_is_named(unbuffered: str) -> None:
    command = [sys.executable, "-m", "specdec_fast", "drafters"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, text=True, timeout=180)
    assert done.returncode == 2 and done.stderr == "specdec: error: standard output: No space left on device\n"


def test_bad_input_of_the_program(program: Any) -> None:
    process = program("generate", "x", "--top-p", "2")
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 2
    assert stdout == b""
    assert (
        stderr == b"specdec: error: --top-p: got 2.0; expected a number above 0 (at least 1e-30), at most 1; 1 is off\n"
    )


def test_chat_says_that_its_default_is_a_base_model(run: Any) -> None:
    shown = " ".join(run("chat", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert "demo-target, a base model" in shown and "[default: demo-target]" not in shown

"""`specdec chat`: questions, commands and answers over pipes, and in a terminal of its own."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from oracles.toy_chat import STRICT, TEMPLATE, chat_tokenizer, speaker

from specdec_fast import Engine
from specdec_fast.cli import main
from specdec_fast.commands import chat_session
from specdec_fast.commands.chat_session import _has_ended
from specdec_fast.targets.tiny_models import tiny_model

GREEDY = ["--model", "x", "--temperature", "0"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the loader by one of a model that says `yes`; the engines that it makes."""
    made: list[Engine] = []

    def install(template: str | None = TEMPLATE, *, answer: str = "yes", context: int = 256) -> list[Engine]:
        def load(*_: Any, max_rows: int, **__: Any) -> Engine:
            tokenizer = chat_tokenizer(template)
            target = speaker(tokenizer, answer, max_rows=max_rows, max_length=context)
            made.append(Engine(target, tokenizer=tokenizer))
            return made[-1]

        monkeypatch.setattr("specdec_fast.loading.load", load)
        return made

    monkeypatch.setattr("specdec_fast.commands.open_engine.note_hub", lambda *_: None)
    return install


def answers(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_line_is_a_question(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, stdin="hello\n\n  \nagain\r\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "yes\nyes\n", "")


def test_json_has_a_line_for_each_answer(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, "--json", "--seed", "5", stdin="hello\nagain\n")
    first, second = answers(result)
    assert (first["turn"], first["question"], first["text"], first["finish_reason"]) == (1, "hello", "yes", "eos")
    assert (first["seed"], second["seed"]) == (5, 6)
    assert first["stats"]["new_tokens"] == 4 and first["dropped_turns"] == 0 and first["error"] is None
    assert second["prompt_tokens"] > first["prompt_tokens"]  # the first turn is part of the second


def test_history_and_commands(run: Any, engines: Any) -> None:
    engines()
    typed = 'a\nb\n/undo\n/system be brief\nc\n/reset\nd\n/system\n/system ""\ne\n/undo\n/undo\n/undo\n/exit\nf\n'
    result = run("chat", *GREEDY, "--json", stdin=typed)
    lengths = {answer["question"]: answer["prompt_tokens"] for answer in answers(result)}
    turn = lengths["b"] - lengths["a"]  # the tokens of a turn
    system = lengths["d"] - lengths["a"]  # those of the system message
    assert turn > 0 and system > 0 and result.exit_code == 0
    assert lengths == {
        "a": lengths["a"],
        "b": lengths["a"] + turn,
        "c": lengths["a"] + turn + system,  # b is undone
        "d": lengths["a"] + system,  # reset keeps the system message
        "e": lengths["a"] + turn,
    }
    assert [line.removeprefix("specdec: note: ") for line in result.stderr.splitlines()] == [
        "the last turn is forgotten",
        "the system message applies from the next answer on",
        "2 turns forgotten",
        "system message: be brief",
        "the system message applies from the next answer on",
        "the last turn is forgotten",
        "the last turn is forgotten",
        "there is no turn to forget",
    ]


def test_slashes(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, "--json", stdin="/nonsense\n/stats now\n//etc is a folder\n")
    assert [answer["question"] for answer in answers(result)] == ["/etc is a folder"]
    first, second = result.stderr.splitlines()
    assert first.startswith("specdec: error: got '/nonsense'; expected /stats, /reset, ")
    assert second.startswith("specdec: error: got '/stats' with a text; expected ")
    assert result.exit_code == 2


def test_statistics_and_help(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, stdin="a\nb\n/stats\n/help\n")
    assert "tokens   8 in " in result.stderr and "; 2 turns" in result.stderr
    assert chat_session.HELP in result.stderr
    result = run("chat", *GREEDY, "--stats", stdin="a\nb\n")
    assert result.stderr.count("tokens   4 in ") == 2 and "context  " in result.stderr
    assert result.stdout == "yes\nyes\n"


def test_a_full_context_is_said(run: Any, engines: Any) -> None:
    engines(context=100)
    result = run(
        "chat", *GREEDY, "--max-new-tokens", "20", "--json", stdin="question one\nquestion two\nquestion three\n"
    )
    assert [answer["dropped_turns"] for answer in answers(result)] == [0, 0, 1]
    assert result.stderr == "specdec: note: the context of 100 tokens is full; 1 old turn forgotten\n"
    result = run("chat", *GREEDY, "--max-new-tokens", "20", "--json", stdin=f"{'long ' * 30}\nshort\n")
    first, second = answers(result)
    assert first["finish_reason"] == "error" and first["error"].startswith("prompt: got 1") and first["text"] == ""
    assert second["text"] == "yes" and second["turn"] == 2  # the chat goes on
    assert result.exit_code == 2 and "error: prompt: got 1" in result.stderr


def test_incomplete_and_empty_answers_are_noted(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, "--max-new-tokens", "2", stdin="a\n")
    assert result.stdout == "ye\n"
    assert result.stderr == "specdec: note: the answer is cut after 2 tokens, as --max-new-tokens says\n"
    engines(context=64)
    result = run("chat", *GREEDY, "--ignore-eos", stdin="a\n")
    assert (
        result.stderr == "specdec: note: the context of 64 tokens is full, so the answer is cut; /reset begins anew\n"
    )
    engines(answer="")
    assert run("chat", *GREEDY, stdin="a\n").stderr == "specdec: note: the model answers nothing\n"


def test_a_refused_system_message(run: Any, engines: Any) -> None:
    engines(STRICT)
    result = run("chat", *GREEDY, "--system", "be brief", stdin="a\n")
    assert result.exit_code == 2 and result.stdout == "" and "roles must alternate" in result.stderr
    result = run("chat", *GREEDY, "--json", stdin="/system be brief\na\n")
    assert "roles must alternate" in result.stderr and answers(result)[0]["question"] == "a"


def test_models_without_a_template_are_referred_to_generate(run: Any, engines: Any) -> None:
    result = run("chat", stdin="a\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("specdec: error: --model: got 'demo-target', which has no chat template; expected")
    assert "specdec generate" in result.stderr
    engines(None)
    assert "--model: got 'x', which has no chat template" in run("chat", *GREEDY, stdin="a\n").stderr


def test_weights_are_not_read_for_a_model_without_a_template(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_fast.loading.load", lambda *_, **__: pytest.fail("the weights were read first"))
    chat_tokenizer(None).save_pretrained(tmp_path)
    result = run("chat", "--model", str(tmp_path), "--max-length", "1", stdin="a\n")
    assert "--max-length: got 1" in result.stderr, "options come first"
    result = run("chat", "--model", str(tmp_path), stdin="a\n")
    assert result.exit_code == 2 and f"got {str(tmp_path)!r}, which has no chat template" in result.stderr


def test_input_that_is_no_text(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, stdin=b"a\n\xff\n")
    assert result.stdout == "yes\n" and result.exit_code == 2
    assert "standard input: got bytes that are not utf-8 text" in result.stderr


def test_the_options_are_those_of_generate() -> None:
    group: Any = typer.main.get_command(main)
    chat, generate = ({option.name: option for option in group.commands[name].params} for name in ("chat", "generate"))
    only_prompts = {"prompt", "file", "lines", "chat", "logprobs"}
    assert set(generate) - set(chat) == only_prompts and not set(chat) - set(generate)
    differing = {name for name in chat if chat[name].default != generate[name].default}
    assert differing == {"max_new_tokens"}


def test_ctrl_c_ends_a_chat_over_pipes(run: Any, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engines()
    step = Engine.step

    def interrupted(self: Engine) -> Any:
        step(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("chat", *GREEDY, "--json", stdin="a\nb\n")
    (answer,) = answers(result)
    assert answer["finish_reason"] == "cancelled" and answer["text"] == "y" and result.exit_code == 130
    assert "interrupted after 1 token; the text so far stays" in result.stderr and made[0].idle


# -- in a terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rambler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model and a chat template."""
    folder = tmp_path_factory.mktemp("rambler")
    tokenizer = chat_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Terminal:
    """`specdec` in a forked process that has a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.reading, slave = os.openpty()
        self.process = multiprocessing.get_context("fork").Process(target=self._child, args=(slave, args), daemon=True)
        self.process.start()
        os.close(slave)
        self.seen = ""

    def _child(self, slave: int, args: tuple[str, ...]) -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(slave, number)
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(0, closefd=False) as sys.stdin, open(1, "w", 1) as sys.stdout, open(2, "w", 1) as sys.stderr:
            try:
                main(args)
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            sys.stdout.flush()
            os._exit(status)

    def type(self, text: str) -> None:
        os.write(self.reading, text.encode())

    def interrupt_prompt(self, *texts: str) -> None:
        """Types Ctrl-C at the prompt until it is seen: Python's readline misses one between prompt and waiting."""
        for _ in range(10):
            self.type("\x03")
            try:
                self.wait_for(*texts, seconds=5)
                return
            except AssertionError:
                continue
        raise AssertionError(self.seen)

    def wait_for(self, *texts: str, seconds: float = 60) -> str:
        """Waits for new output that has all texts in this order, and returns it."""
        limit, new = time.monotonic() + seconds, ""
        while not _in_order(new, texts):
            assert time.monotonic() < limit, (texts, self.seen)
            if select.select([self.reading], [], [], 0.1)[0]:
                try:
                    new += os.read(self.reading, 4096).decode(errors="replace")
                except OSError:  # the process has ended
                    assert _in_order(new, texts), (texts, self.seen + new)
        self.seen += new
        return new


def _in_order(text: str, wanted: tuple[str, ...]) -> bool:
    at = 0
    for each in wanted:
        at = text.find(each, at)
        if at < 0:
            return False
        at += len(each)
    return True


@pytest.mark.parametrize(("typed", "ended"), [("", False), ("\x04", True), ("more\n", False), ("mo", False)])
def test_an_end_that_was_typed_during_an_answer_is_seen(typed: str, ended: bool) -> None:
    writing, terminal = os.openpty()
    try:
        os.write(writing, typed.encode())
        assert _has_ended(terminal) == ended
        if typed.endswith("\n"):
            assert os.read(terminal, 9) == typed.encode()  # nothing of it was taken
    finally:
        os.close(writing)
        os.close(terminal)


@pytest.fixture
def terminal(rambler: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    made = Terminal("chat", "--model", rambler, "--seed", "1", "--ignore-eos", "--max-new-tokens", "4000")
    yield made
    made.process.kill()
    made.process.join()
    os.close(made.reading)


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(terminal: Terminal) -> None:
    greeting = terminal.wait_for("> ")
    assert "drafter auto, 4,096 tokens of context. /help lists commands, Ctrl-D leaves." in " ".join(greeting.split())
    terminal.type("hello\n")
    terminal.wait_for("hello", "\n", "e")  # some text of the answer
    terminal.type("\x03")
    terminal.wait_for("(interrupted after ", "the text so far stays in the chat; /undo forgets it)", "> ")
    terminal.type("/stats\n")
    assert "; 1 turn" in terminal.wait_for("context ", "> ")
    terminal.interrupt_prompt("(Ctrl-D or /exit leaves)", "> ")
    terminal.type("one \\\n")
    terminal.wait_for(". ")
    terminal.type("two\n")
    terminal.wait_for("two", "\n", "e")
    terminal.type("\x03")
    terminal.wait_for("(interrupted after ", "> ")
    terminal.type("\x04")
    terminal.process.join(30)
    assert terminal.process.exitcode == 0


def test_ctrl_d_during_an_answer_ends_the_chat_after_it(rambler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal("chat", "--model", rambler, "--seed", "1", "--ignore-eos", "--max-new-tokens", "1000")
    try:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello", "\n", "e")
        terminal.type("\x04")
        terminal.wait_for("(the answer is cut after 1,000 tokens")
        terminal.process.join(30)
        assert terminal.process.exitcode == 0
    finally:
        terminal.process.kill()


def test_the_context_in_stats_is_that_of_the_turns_that_are_left(run: Any, engines: Any) -> None:
    engines()
    result = run("chat", *GREEDY, stdin="a\n/stats\nb\n/stats\n/undo\n/stats\n/reset\n/stats\n/undo\n/stats\n")
    found = [int(words) for words in re.findall(r"context\s+(\d+) of", result.stderr)]
    assert len(found) == 5 and 0 < found[0] < found[1] and found[2:] == [found[0], 0, 0], result.stderr

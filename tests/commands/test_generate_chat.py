"""`specdec generate` with conversations: --chat, --system, messages in files, and a hint where they are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracles.toy_chat import TEMPLATE, chat_tokenizer, speaker

from specdec_fast import Engine
from specdec_fast.commands.chat_options import read_template, unread_options
from specdec_fast.commands.prompts import Entry, as_conversations

GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Engine]]:
    """Replaces the loader: every command gets a model that says `yes` to a question, and ends all other text."""
    made: list[Engine] = []

    def install(template: str | None = TEMPLATE, *, end: str = "<|end|>") -> list[Engine]:
        def load(*_: Any, max_rows: int, **__: Any) -> Engine:
            tokenizer = chat_tokenizer(template)
            target = speaker(tokenizer, "yes", end, max_rows=max_rows)
            made.append(Engine(target, tokenizer=tokenizer, eos_token_ids=(tokenizer.eos_token_id,)))
            return made[-1]

        monkeypatch.setattr("specdec_fast.loading.load", load)
        return made

    return install


def prompts(result: Any) -> list[Any]:
    return [request.get("messages", request["prompt"]) for request in json.loads(result.stdout)["requests"]]


def test_the_template_is_applied_on_request(run: Any, engines: Any) -> None:
    engines()
    result = run("generate", "hello", *GREEDY, "--chat")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "yes\n", "")
    (request,) = json.loads(run("generate", "hello", *GREEDY, "--chat", "--json").stdout)["requests"]
    assert request["prompt"] == "hello" and request["messages"] == [{"role": "user", "content": "hello"}]
    assert request["finish_reason"] == "eos" and len(request["sampling"]["stop_token_ids"]) == 1


def test_a_system_message_implies_a_chat(run: Any, engines: Any) -> None:
    engines()
    result = run("generate", "hello", *GREEDY, "--system", "be brief", "--json")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert prompts(result) == [messages]


def test_conversations_in_a_file(run: Any, engines: Any, tmp_path: Path) -> None:
    engines()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    own = [{"role": "system", "content": "mine"}, *turns]
    path = tmp_path / "chats.jsonl"
    lines = [{"messages": turns, "id": 3}, {"messages": own, "max_new_tokens": 2}, "hello", {"messages": [{}]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", "--file", str(path), *GREEDY, "--json")
    requests = json.loads(result.stdout)["requests"]
    assert [request["text"] for request in requests] == ["yes", "ye", "", ""]
    assert prompts(result) == [turns, own, "hello", [{}]] and requests[0]["id"] == 3
    assert (
        result.exit_code == 2 and f"error: --file {path}, line 4: messages: got no role in message 1" in result.stderr
    )
    result = run("generate", "--file", str(path), *GREEDY, "--system", "ours", "--json")
    ours = {"role": "system", "content": "ours"}
    hello = {"role": "user", "content": "hello"}
    assert prompts(result) == [[ours, *turns], own, [ours, hello], [ours, {}]]


def test_a_single_conversation_is_refused_where_it_is(run: Any, engines: Any, tmp_path: Path) -> None:
    engines()
    path = tmp_path / "chat.json"
    path.write_text('{"messages": []}')
    result = run("generate", "--file", str(path), *GREEDY)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"specdec: error: --file {path}: messages: got an empty list; expected")


def test_template_options_reach_the_template(run: Any, engines: Any, tmp_path: Path) -> None:
    made = engines()
    options = ["--chat", "--template-option", "mood=glad", "--template-option", "size=3"]
    result = run("generate", "hello", *GREEDY, *options)
    assert result.stderr == "specdec: note: --template-option size: the chat template does not read it\n"
    path = tmp_path / "other.jinja"
    path.write_text("{{ messages[0]['content'] }}{{ size }}:")
    result = run("generate", "hello", *GREEDY, *options, "--chat-template", str(path), "--json")
    assert json.loads(result.stdout)["requests"][0]["finish_reason"] == "length"  # this template ends no turn
    assert result.stderr == "specdec: note: --template-option mood: the chat template does not read it\n"
    assert len(made) == 2


def test_a_named_template_is_searched_for_options() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"default": "{{ a }}", "other": "{{ b }}"}
    assert unread_options(tokenizer, read_template("other", ["a=1", "b=1", "c=1", "documents=[]"])) == ["a", "c"]
    assert unread_options(chat_tokenizer(None), read_template(None, ["a=1"])) == ["a"]


def test_values_of_template_options() -> None:
    given = ["a=False", "b=true", "c=None", "d=3", "e=[1]", "f=low", "g="]
    wanted = {"a": False, "b": True, "c": None, "d": 3, "e": [1], "f": "low", "g": ""}
    assert read_template(None, given) == {"template_options": wanted}
    assert read_template(None, None) == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--template-option", "x=1"],
            "--template-option: got no conversation; expected --chat, or messages in --file",
        ),
        (["--chat-template", "x"], "--chat-template: got no conversation; expected --chat"),
        (["--chat", "--template-option", "x"], "--template-option: got 'x'; expected NAME=VALUE"),
        (["--chat", "--template-option", "tokenize=1"], "--template-option: got 'tokenize'; expected a variable"),
        (["--chat", "--chat-template", "x"], "--chat-template: got 'x'; expected a file with a Jinja template; drop"),
        (["--chat", "--chat-template", "{png}"], "which is not UTF-8 text (byte 0); convert it"),
    ],
)
def test_bad_options(run: Any, engines: Any, tmp_path: Path, flags: list[str], said: str) -> None:
    engines()
    (tmp_path / "png").write_bytes(b"\x89PNG")
    result = run("generate", "hello", *GREEDY, *(flag.format(png=tmp_path / "png") for flag in flags))
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.startswith("specdec: error: ")


def test_models_without_a_template(run: Any, engines: Any) -> None:
    engines(None)
    result = run("generate", "hello", *GREEDY, "--chat")
    assert result.exit_code == 2
    assert "got a tokenizer without a chat template" in result.stderr and "--chat-template FILE" in result.stderr


def test_token_ids_are_no_question() -> None:
    with pytest.raises(ValueError, match="x: got token ids with --chat; expected text"):
        as_conversations([Entry([1, 2], "x")], None)


def test_prompt_and_messages_exclude_each_other(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text('{"prompt": "a", "messages": []}')
    result = run("generate", "--file", str(path))
    assert result.exit_code == 2 and "line 1: got a prompt and messages; expected one of them" in result.stderr


def test_commands_without_a_template_refuse_messages(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    result = run("tune", "tree", "--file", str(path))
    assert result.exit_code == 2 and "got messages; expected a prompt" in result.stderr


@pytest.mark.parametrize(
    ("prompt", "flags", "hinted"),
    [
        ("hello", [], True),
        ("<|start|>user:hello<|end|>", [], False),  # the template is there already
        ("hello:", [], False),  # the model says something
        ("hello", ["--chat"], False),
    ],
)
def test_a_model_that_answers_nothing_gets_a_hint(
    run: Any, engines: Any, prompt: str, flags: list[str], hinted: bool
) -> None:
    engines(end="<end>")
    result = run("generate", prompt, *GREEDY, *flags)
    hint = "specdec: note: the model answers nothing; it has a chat template, so try --chat\n"
    assert result.exit_code == 0 and result.stderr == (hint if hinted else "")


def test_a_model_without_a_template_gets_no_hint(run: Any, engines: Any) -> None:
    engines(None, end="<end>")
    assert run("generate", "hello", *GREEDY).stderr == ""


def test_the_hint_counts_the_prompts(run: Any, engines: Any, tmp_path: Path) -> None:
    engines(end="<end>")
    path = tmp_path / "several.jsonl"
    path.write_text('"hello"\n"hello:"\n"moin"')
    result = run("generate", "--file", str(path), *GREEDY)
    assert "note: the model answers nothing for 2 prompts; it has" in result.stderr

"""The history of a chat: every turn is submitted again, and old turns make way where the context ends."""

from __future__ import annotations

import pytest
from oracles.toy_chat import STRICT, TEMPLATE, chat_tokenizer, speaker

from specdec_fast import Engine, SamplingParams
from specdec_fast.commands.conversation import Conversation

PARAMS = SamplingParams(temperature=0, max_new_tokens=16)


def engine_of(template: str = TEMPLATE, context: int = 256) -> Engine:
    tokenizer = chat_tokenizer(template)
    return Engine(speaker(tokenizer, "yes", max_length=context, max_rows=1), tokenizer=tokenizer)


def text(engine: Engine, tokens: list[int]) -> str:
    return engine.tokenizer.decode(tokens)


def test_every_question_comes_with_what_was_said() -> None:
    engine = engine_of()
    chat = Conversation(engine, "brief")
    chat.keep("a", "b")
    handle, dropped = chat.submit("c", PARAMS)
    assert dropped == 0
    head = "<bos><|start|>system:brief<|end|>\n<|start|>user:a<|end|>\n<|start|>assistant:b<|end|>\n"
    assert text(engine, list(handle.prompt)) == f"{head}<|start|>user:c<|end|>\n<|start|>assistant:"
    assert chat.turns == [("a", "b")]  # the answer is kept when it has ended


def test_the_oldest_turns_make_way_for_an_answer() -> None:
    engine = engine_of(context=120)
    chat = Conversation(engine, "brief")
    for at in range(4):
        chat.keep(f"question {at}", "yes")
    lengths = []
    for at in range(4, 7):
        handle, dropped = chat.submit(f"question {at}", PARAMS)
        engine.cancel(handle)
        chat.keep(f"question {at}", "yes")
        lengths.append((len(handle.prompt), dropped))
        assert text(engine, list(handle.prompt)).startswith("<bos><|start|>system:brief<|end|>")  # it stays
    assert [dropped for _, dropped in lengths] == [3, 1, 1]
    assert all(120 - 2 * 40 < length <= 120 - 16 for length, _ in lengths)
    assert [question for question, _ in chat.turns] == ["question 5", "question 6"]


def test_a_long_limit_of_answers_leaves_three_quarters_to_the_history() -> None:
    chat = Conversation(engine_of(context=160))
    chat.keep("question", "yes" * 20)
    handle, dropped = chat.submit("question", SamplingParams(max_new_tokens=1000))
    assert dropped == 0 and len(handle.prompt) <= 120
    chat.keep("question", "yes")
    handle, dropped = chat.submit("question", SamplingParams(max_new_tokens=1000))
    assert dropped == 1


def test_a_question_that_is_too_long_changes_nothing() -> None:
    chat = Conversation(engine_of(context=100))
    chat.keep("a", "b")
    with pytest.raises(ValueError, match=r"prompt: got \d+ tokens; expected fewer than the context limit of 100"):
        chat.submit("long " * 30, PARAMS)
    assert chat.turns == [("a", "b")]


def test_a_system_message_that_the_template_refuses_changes_nothing() -> None:
    chat = Conversation(engine_of(STRICT))
    with pytest.raises(ValueError, match=r"messages: got roles system, user; .*roles must alternate"):
        chat.system = "be brief"
    assert chat.system is None
    with pytest.raises(ValueError, match="roles must alternate"):
        Conversation(engine_of(STRICT), "be brief")


def test_the_template_may_be_another() -> None:
    engine = engine_of()
    chat = Conversation(engine, None, {"chat_template": "{{ messages[-1]['content'] }}:"})
    handle, _ = chat.submit("x", PARAMS)
    assert text(engine, list(handle.prompt)) == "x:"

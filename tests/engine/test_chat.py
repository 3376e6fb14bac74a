"""Chats: the prompt equals the template's text without a second first token, and answers end where turns do."""

from __future__ import annotations

from typing import Any

import pytest
from oracles.toy_chat import BOS, END_OF_TURN, STRICT, TEMPLATE, chat_tokenizer, speaker

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.engine.chat import end_of_turn_ids

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [{"role": "system", "content": "be brief"}, *HELLO]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def engine_of(text: str = "yes", *, template: str | None = TEMPLATE, drafter: Any = None, **shape: int) -> Engine:
    tokenizer = chat_tokenizer(template)
    eos = tokenizer.eos_token_id
    return Engine(speaker(tokenizer, text, **shape), drafter, tokenizer=tokenizer, eos_token_ids=(eos,))


def written(engine: Engine, text: str) -> list[int]:
    """The ids of a text whose special tokens are all written out."""
    return engine.tokenizer.encode(text, add_special_tokens=False)


def test_the_template_alone_writes_the_first_token() -> None:
    engine = engine_of()
    found = engine.encode_chat(TURNS)
    text = f"{BOS}<|start|>system:be brief<|end|>\n<|start|>user:hello<|end|>\n<|start|>assistant:"
    assert found == written(engine, text)
    assert found.count(engine.tokenizer.bos_token_id) == 1
    assert engine.tokenizer.encode(text).count(engine.tokenizer.bos_token_id) == 2  # what the engine must not do


def test_arguments_reach_the_template() -> None:
    engine = engine_of()
    head = f"{BOS}<|start|>user:hello"
    assert engine.encode_chat(HELLO, add_generation_prompt=False) == written(engine, f"{head}<|end|>\n")
    found = engine.encode_chat(HELLO, template_options={"mood": "glad"}, tools=[{"name": "clock"}])
    assert found == written(engine, f"{head}<|end|>\n[clock](glad)<|start|>assistant:")
    found = engine.encode_chat(HELLO, chat_template="{{ messages[0]['content'] }}!")
    assert found == written(engine, "hello!")


def test_the_last_message_is_continued() -> None:
    engine = engine_of()
    begun = [*HELLO, {"role": "assistant", "content": "ye"}]
    found = engine.encode_chat(begun, continue_final_message=True)
    assert found == written(engine, f"{BOS}<|start|>user:hello<|end|>\n<|start|>assistant:ye")
    assert engine.chat(begun, GREEDY, continue_final_message=True).text == "s"


def test_text_parts_are_joined() -> None:
    engine = engine_of()
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert engine.encode_chat([{"role": "user", "content": parts}]) == engine.encode_chat(HELLO)


def test_a_message_may_be_a_call_of_a_tool() -> None:
    engine = engine_of(template="{% for m in messages %}{{ m['tool_calls'] or m['content'] }}{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": ["f()"]}
    assert engine.encode_chat([call]) == written(engine, "['f()']")
    engine = engine_of(template="{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}")
    assert engine.encode_chat([call]) == written(engine, "<>")  # as templates do that know no tools
    engine = engine_of(
        template="{% for m in messages %}{{ '<' + m['content'] + '>' + m['tool_calls'][0] }}{% endfor %}"
    )
    assert engine.encode_chat([call]) == written(engine, "<>f()")  # an empty content, where none is refused
    asks = "{% if 'content' not in m %}{{ m['tool_calls'] }}{% endif %}"
    engine = engine_of(template=f"{{% for m in messages %}}{asks}{{% endfor %}}")
    assert engine.encode_chat([call]) == written(engine, "['f()']")


def test_tools_that_no_template_reads_are_refused() -> None:
    tools = [{"name": "clock"}]
    deaf = engine_of(template="{{ messages[0]['content'] }}")
    with pytest.raises(
        ValueError, match=r"tools: got 1; expected none, .* does not read them; describe them in a mess"
    ):
        deaf.chat(HELLO, tools=tools)
    assert deaf.encode_chat(HELLO, tools=tools, chat_template=TEMPLATE) == engine_of().encode_chat(HELLO, tools=tools)
    assert deaf.encode_chat(HELLO, tools=[]) == written(deaf, "hello")
    deaf.tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "tool_use": "{{ tools }}"}
    with pytest.raises(ValueError, match="tools: got 1; expected none"):
        deaf.chat(HELLO, tools=tools, chat_template="default")
    assert deaf.encode_chat(HELLO, tools=tools) == written(deaf, str(tools)), "transformers chooses tool_use"


@pytest.mark.parametrize("speculate", [False, True])
def test_an_answer_ends_where_the_template_ends_a_turn(speculate: bool) -> None:
    engine = engine_of(drafter=get_drafter("ngram")() if speculate else None)
    assert engine.tokenizer.convert_tokens_to_ids(END_OF_TURN) not in engine.eos_token_ids
    handle = engine.chat(HELLO, GREEDY)
    assert (handle.text, handle.finish_reason) == ("yes", "eos")
    assert handle.stats.new_tokens == len(handle.tokens) == 4
    (plain,) = engine.generate([engine.encode_chat(HELLO)], GREEDY)
    assert plain.finish_reason == "length" and plain.tokens[:4] == handle.tokens  # without a chat, ends are the model's


def test_own_ends_are_kept_and_ignored_ends_are_not_added() -> None:
    engine = engine_of()
    (e,) = written(engine, "e")
    handle = engine.chat(HELLO, SamplingParams(temperature=0, stop_token_ids=(e,)))
    assert (handle.text, handle.finish_reason) == ("y", "eos")
    handle = engine.chat(HELLO, SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True))
    assert handle.finish_reason == "length" and len(handle.tokens) == 9


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }} \n<|start|>{% endfor %}", "<|start|>"),
        ("{% for m in messages %}{{ m['content'] }}</turn><|end|>{% endfor %}", None),  # text comes before the token
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_what_ends_a_turn_is_read_from_the_template(template: str, end: str | None) -> None:
    tokenizer = chat_tokenizer(template)
    eos = tokenizer.eos_token_id
    found = () if end is None else (tokenizer.convert_tokens_to_ids(end),)
    assert end_of_turn_ids(tokenizer, (eos,)) == found
    assert end_of_turn_ids(tokenizer, (eos, *found)) == ()
    assert end_of_turn_ids(tokenizer, ()) == (eos, *found)  # a model without ends of its own has the tokenizer's
    assert end_of_turn_ids(chat_tokenizer(None), ()) == end_of_turn_ids(None, ()) == ()
    assert end_of_turn_ids(chat_tokenizer(None), (eos,), template) == found


def test_another_template_has_its_own_end() -> None:
    engine = engine_of("yes", template="{{ messages[0]['content'] }}:")
    assert engine.end_of_turn_ids == ()
    assert engine.chat(HELLO, GREEDY).finish_reason == "length"
    handle = engine.chat(HELLO, GREEDY, chat_template=TEMPLATE)
    assert (handle.text, handle.finish_reason) == ("yes", "eos")


def test_an_end_outside_of_the_models_vocabulary_is_left_out() -> None:
    tokenizer = chat_tokenizer()
    target = speaker(tokenizer, "yes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|late|>"]})
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "<|late|>")
    engine = Engine(target, tokenizer=tokenizer)
    assert engine.end_of_turn_ids == (tokenizer.eos_token_id,)
    with pytest.raises(ValueError, match=r"prompt: got token id \d+; expected 0\.\."):
        engine.chat(HELLO)


def test_answers_stream() -> None:
    engine = engine_of()
    handle = engine.submit_chat(HELLO, GREEDY, num_draft_tokens=0)
    assert "".join(engine.stream(handle)) == "yes" and engine.idle


def test_a_batch_of_conversations() -> None:
    engine = engine_of(max_rows=2)
    long = SamplingParams(temperature=0, max_new_tokens=2)
    handles = engine.chat([HELLO, [{"role": "user"}], TURNS, TURNS * 9], [GREEDY, GREEDY, long, GREEDY])
    assert [handle.finish_reason for handle in handles] == ["eos", "error", "length", "error"]
    assert [handle.text for handle in handles] == ["yes", "", "ye", ""]
    assert str(handles[1].error).startswith("messages: got no content in message 1")
    assert str(handles[3].error).startswith("prompt: got ")
    with pytest.raises(ValueError, match="params: got 1 for 2 prompts"):
        engine.chat([HELLO, HELLO], [GREEDY])
    with pytest.raises(ValueError, match=r"prompt: got \d+ tokens; expected fewer"):
        engine.chat(TURNS * 9, GREEDY)
    assert engine.idle


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "got 'hello'; expected a list of messages"),
        ({"role": "user", "content": "x"}, "got {'role': 'user', 'content': 'x'}; expected a list"),
        ([], "got an empty list; expected a list of messages"),
        (["hello"], "got 'hello' as message 1"),
        ([*HELLO, {"content": "x"}], "got no role in message 2"),
        ([{"role": 3, "content": "x"}], "got the role 3 in message 1"),
        ([{"role": "", "content": "x"}], "got the role '' in message 1"),
        ([{"role": "user"}], "got no content in message 1"),
        ([{"role": "user", "content": None}], "got no content in message 1"),
        ([{"role": "user", "content": 5}], "got the content 5 in message 1; expected text"),
        ([{"role": "user", "content": ["x"]}], "got the part 'x' in message 1; expected parts of type text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "got the part {'type': 'text'} in message 1"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got a part of type 'image_url' in message 1"),
        ([{"role": "user", "content": "a\ud83d"}], "got the content 'a\\ud83d' in message 1; expected Unicode text"),
        ([{"role": "a\ud83d", "content": "a"}], "got the role 'a\\ud83d' in message 1; expected Unicode text"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, said: str) -> None:
    engine = engine_of()
    with pytest.raises(ValueError) as error:
        engine.chat(messages)
    assert str(error.value).startswith(f"messages: {said}")
    assert "; expected " in str(error.value) and engine.idle


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    engine = engine_of(template=STRICT)
    with pytest.raises(ValueError) as error:
        engine.chat(TURNS)
    assert str(error.value).startswith("messages: got roles system, user; expected messages that the chat template")
    assert "'roles must alternate user/assistant'" in str(error.value)
    with pytest.raises(ValueError, match=r"messages: got roles user; .*template"):
        engine.chat(HELLO, chat_template="{% for %}")


def test_models_without_a_template_are_named() -> None:
    engine = engine_of(template=None)
    with pytest.raises(ValueError, match=r"messages: got a tokenizer without a chat template.*pass chat_template="):
        engine.chat(HELLO)
    assert engine.chat(HELLO, GREEDY, chat_template=TEMPLATE).text == "yes"
    bare = Engine(engine.target)
    with pytest.raises(ValueError, match=r"messages: got an engine without a tokenizer"):
        bare.submit_chat(HELLO)


def test_a_template_may_be_named() -> None:
    engine = engine_of()
    engine.tokenizer.chat_template = {"default": TEMPLATE, "short": "{{ messages[0]['content'] }}:"}
    assert engine.encode_chat(HELLO, chat_template="short") == written(engine, "hello:")
    with pytest.raises(ValueError, match=r"chat_template: got 'long'; .*the tokenizer's \(default, short\); pass None"):
        engine.encode_chat(HELLO, chat_template="long")
    with pytest.raises(ValueError, match=r"chat_template: got 'short'; expected the text of a Jinja template; pass"):
        engine_of().encode_chat(HELLO, chat_template="short")


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "tools", "chat_template"])
def test_options_may_not_replace_arguments_of_the_tokenizer(name: str) -> None:
    with pytest.raises(ValueError, match=rf"template_options: got '{name}'; expected variables"):
        engine_of().encode_chat(HELLO, template_options={name: False})


def test_options_are_a_mapping() -> None:
    with pytest.raises(ValueError, match=r"template_options: got \['x'\]; expected a mapping"):
        engine_of().encode_chat(HELLO, template_options=["x"])  # type: ignore[arg-type]

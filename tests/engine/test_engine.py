"""The public behaviour of the engine: lengths, ends, budgets, statistics, streams, cancellation, errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.toy_tokenizer import END_OF_TEXT, byte_tokenizer

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.engine.request import Handle

TOKENIZER = byte_tokenizer()
PROMPT = [1, 2, 3]


def target(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, 8, seed=2), **shape)


def plain(params: SamplingParams, prompt: list[int] = PROMPT, **engine: Any) -> Handle:
    return Engine(target(), **engine).generate([prompt], params)[0]


def oracle(tokens: list[int], alpha: float = 0.9, count: int = 5, tree: bool = False) -> Any:
    return (NoisyTree if tree else NoisyChain)([[*PROMPT, *tokens]], alpha, 8, num_draft_tokens=count)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 11])
@pytest.mark.parametrize("tree", [False, True])
def test_max_new_tokens_is_exact(limit: int, tree: bool) -> None:
    params = SamplingParams(seed=4, max_new_tokens=limit)
    full = plain(SamplingParams(seed=4, max_new_tokens=20)).tokens
    engine = Engine(target(), oracle(full, alpha=1.0, tree=tree))
    handle = engine.generate([PROMPT], params)[0]
    assert handle.tokens == full[:limit] and handle.finish_reason == "length" and handle.limit == "max_new_tokens"
    assert handle.stats.num_draft_tokens <= limit - 1 + 5 * handle.stats.steps


def test_any_of_several_ends_and_further_stop_ids() -> None:
    full = plain(SamplingParams(seed=6, max_new_tokens=40)).tokens
    for ends, stops, ignore in [
        ((full[7],), (), False),
        ((full[9], full[4]), (), False),
        ((full[4],), (full[8],), True),
    ]:
        params = SamplingParams(seed=6, max_new_tokens=40, stop_token_ids=stops, ignore_eos=ignore)
        active = {*stops, *(() if ignore else ends)}
        want = full[: next(at for at, token in enumerate(full) if token in active) + 1]
        for drafter in (None, oracle(full), oracle(full, tree=True)):
            handle = Engine(target(), drafter, eos_token_ids=ends).generate([PROMPT], params)[0]
            assert handle.tokens == want and handle.finish_reason == "eos" and handle.limit is None


def test_min_new_tokens_forbids_earlier_ends() -> None:
    ends = tuple(range(1, 8))  # all tokens but 0 end a text
    for minimum in (0, 1, 4):
        handle = plain(SamplingParams(seed=1, min_new_tokens=minimum, max_new_tokens=9), eos_token_ids=ends)
        assert handle.tokens[:minimum] == [0] * minimum and len(handle.tokens) > minimum


@pytest.mark.parametrize("length", [1, 5, 14, 15])
def test_the_context_limit_ends_a_text(length: int) -> None:
    prompt = [1] * length
    want = Engine(target(max_length=64)).generate([prompt], SamplingParams(seed=2, max_new_tokens=40))[0].tokens
    drafter = NoisyChain([[*prompt, *want]], 1.0, 8, num_draft_tokens=8)
    for used in (None, drafter):
        engine = Engine(target(max_length=16, page_size=4), used)
        handle = engine.generate([prompt], SamplingParams(seed=2, max_new_tokens=40))[0]
        assert handle.tokens == want[: 16 - length] and handle.finish_reason == "length"
        assert handle.limit == "max_length" == handle.as_dict()["limit"]


def test_a_request_without_drafts_among_others() -> None:
    params = SamplingParams(seed=5, max_new_tokens=16)
    full = plain(params).tokens
    engine = Engine(target(), oracle(full))
    handles = [engine.submit(PROMPT, params, num_draft_tokens=count) for count in (0, None, 2, 50)]
    while not engine.idle:
        engine.step()
    assert all(handle.tokens == full for handle in handles)
    assert (
        handles[0].stats.num_draft_tokens == 0 and set(handles[0].origins) == {"plain"} and handles[0].stats.tau == 1.0
    )
    assert handles[1].stats.steps < 16 and handles[3].stats.steps <= handles[2].stats.steps


def test_an_engine_without_a_drafter_uses_plain_decoding() -> None:
    handle = plain(SamplingParams(seed=5, max_new_tokens=10))
    assert handle.stats.steps == 10 and set(handle.origins) == {"plain"} and handle.stats.tested == []


@pytest.mark.parametrize("tree", [False, True])
def test_statistics_add_up(tree: bool) -> None:
    source = random.Random(0)
    wanted = [SamplingParams(seed=seed, max_new_tokens=source.randrange(1, 30)) for seed in range(20)]
    texts = [[*PROMPT, *plain(params).tokens] for params in wanted]
    kind = NoisyTree if tree else NoisyChain
    engine = Engine(target(max_rows=6), kind(texts, 0.7, 8, num_draft_tokens=6))
    handles = engine.generate([PROMPT] * 20, wanted)
    for handle in handles:
        stats = handle.stats
        assert stats.new_tokens == len(handle.tokens) == len(handle.origins)
        assert stats.tau == len(handle.tokens) / stats.steps
        assert stats.tested == sorted(stats.tested, reverse=True)
        assert all(hit <= seen for hit, seen in zip(stats.accepted_per_position, stats.tested, strict=True))
        kept, is_cut = handle.origins.count("accepted"), handle.origins[-1] == "accepted"
        assert kept == stats.num_accepted and len(handle.tokens) == kept + stats.steps - is_cut
        assert handle.origins.count("recovered") <= sum(stats.tested) - sum(stats.accepted_per_position)
        assert sum(stats.tested) <= stats.num_draft_tokens and len(stats.tested) <= 6
    total = engine.stats
    assert total.new_tokens == sum(len(handle.tokens) for handle in handles)
    assert total.steps == sum(handle.stats.steps for handle in handles)
    assert total.tested[0] == sum(handle.stats.tested[0] for handle in handles if handle.stats.tested)
    assert all(seconds >= 0 for seconds in engine.seconds.values()) and engine.seconds["score"] > 0
    for handle in handles:
        verbs = handle.stats.seconds
        assert all(0 < verbs[verb] <= engine.seconds[verb] for verb in ("propose", "score", "verify", "commit"))


def test_a_tree_s_depths_count_as_tested_only_where_there_was_a_child() -> None:
    """A root with one child: it is accepted, and it has no child that could be tested."""
    full = plain(SamplingParams(seed=4, max_new_tokens=8)).tokens
    engine = Engine(target(), oracle(full, alpha=1.0, count=1, tree=True))
    handle = engine.generate([PROMPT], SamplingParams(seed=4, max_new_tokens=8))[0]
    assert handle.tokens == full and handle.stats.alpha_per_position == [1.0]
    assert handle.origins == ["accepted", "bonus"] * 4


def test_prompts_that_cannot_be_served_are_refused_alone() -> None:
    engine = Engine(target(max_length=16, num_pages=4, page_size=4), eos_token_ids=(0,))
    good = SamplingParams(seed=1, max_new_tokens=4)
    prompts: list[Any] = [[1, 2], [], [1, 99], [-1], "text", [1.5], 7, [1] * 16, [1] * 12, [1, 2]]
    params = [good] * 8 + [SamplingParams(seed=1, max_new_tokens=100)] + [good]
    handles = engine.generate(prompts, params)
    assert [handle.finish_reason for handle in (handles[0], handles[-1])] == ["length"] * 2
    assert handles[0].tokens == handles[-1].tokens
    wanted = [
        "no tokens",
        "token id 99",
        "token id -1",
        "without a tokenizer",
        "[1.5]",
        "got 7",
        "16 tokens",
        "pages",
    ]
    for handle, part in zip(handles[1:-1], wanted, strict=True):
        assert handle.finish_reason == "error" and part in str(handle.error) and handle.tokens == []
        assert any(word in str(handle.error) for word in ("expected", "pass", "lower")), handle.error


@pytest.mark.parametrize(
    ("engine", "params", "message"),
    [
        ({}, {"stop": "x"}, "stop strings: got an engine without a tokenizer; pass tokenizer="),
        ({}, {"stop_token_ids": (8,)}, "stop_token_ids: got 8; expected ids below 8"),
        ({"rule": "greedy"}, {"temperature": 0.5}, "rule greedy: got temperature 0.5; expected 0"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine: Any, params: Any, message: str) -> None:
    made = Engine(target(), **engine)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        made.submit(PROMPT, SamplingParams(**params))
    assert made.idle


def test_bad_arguments_of_the_engine() -> None:
    for wrong in (-1, 2.5, "4", True):
        engine = Engine(target())
        with pytest.raises(ValueError, match=f"num_draft_tokens: got {wrong!r}; expected an integer, 0 or more"):
            engine.submit(PROMPT, num_draft_tokens=wrong)  # type: ignore[arg-type]
        assert engine.idle
    for chunk in (0, "64", 2.5):
        with pytest.raises(ValueError, match=f"prefill_chunk: got {chunk!r}; expected a number of tokens, at least 1"):
            Engine(target(), prefill_chunk=chunk)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 1 for 2 prompts; expected one, or one per prompt"):
        Engine(target()).generate([PROMPT, PROMPT], [SamplingParams()])
    with pytest.raises(ValueError, match="rule: got 'nothing'; expected one of"):
        Engine(target(), rule="nothing")


def test_cancelling_frees_all_memory_and_keeps_the_text() -> None:
    engine = Engine(target(max_rows=2), oracle([], count=3))
    params = SamplingParams(seed=1, max_new_tokens=50)
    running, other, waiting = (engine.submit(PROMPT, params) for _ in range(3))
    for _ in range(3):
        engine.step()
    assert engine.num_running == 2 and engine.num_queued == 1
    engine.cancel(waiting)
    engine.cancel(running)
    engine.cancel(running)
    have = list(running.tokens)
    assert have and running.finish_reason == waiting.finish_reason == "cancelled" and waiting.tokens == []
    assert engine.num_running == 1 and engine.num_queued == 0
    while not engine.idle:
        engine.step()
    assert running.tokens == have and len(other.tokens) == 50 and other.tokens[: len(have)] == have
    assert engine.target.cache.pages.num_used == 0 and engine.state.num_free == 2


def test_more_requests_than_rows_are_queued() -> None:
    engine = Engine(target(max_rows=2))
    handles = engine.generate([PROMPT] * 7, [SamplingParams(seed=seed, max_new_tokens=6) for seed in range(7)])
    assert [handle.tokens for handle in handles] == [
        plain(SamplingParams(seed=seed, max_new_tokens=6)).tokens for seed in range(7)
    ]


def ids(text: str) -> list[int]:
    return [TOKENIZER.convert_tokens_to_ids(TOKENIZER.byte_names[byte]) for byte in text.encode()]


def writer(text: str, prompt: str = "go") -> tuple[AutomatonTarget, list[int]]:
    """Returns a target that writes a text after a prompt, byte by byte, and all its ids."""
    script = [*ids(prompt), *ids(text)]
    return scripted(script, len(TOKENIZER), max_length=128, page_size=8), script


@pytest.mark.parametrize("count", [0, 1, 7])
def test_stop_strings_across_token_borders(count: int) -> None:
    text = "naïve € then END and more"
    model, script = writer(text)
    engine = Engine(model, NoisyChain([script], 1.0, 266, num_draft_tokens=count), tokenizer=TOKENIZER)
    params = SamplingParams(temperature=0, max_new_tokens=60, stop=("END", "zzz"))
    handle = engine.generate(["go"], params)[0]
    assert handle.text == "naïve € then " and handle.finish_reason == "stop"
    assert handle.tokens == ids("naïve € then END")
    assert handle.stats.num_accepted == handle.origins.count("accepted"), "what follows the text counts nowhere"


@pytest.mark.parametrize("count", [0, 6])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "Hi."),
        ({"include_stop_str_in_output": True}, "Hi.\n"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<end>Hi.\n<|turn|>"),
    ],
)
def test_a_stop_string_with_a_special_token_ends_text_and_stream(count: int, changes: Any, text: str) -> None:
    tokenizer = byte_tokenizer.__wrapped__()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    end, turn = (tokenizer.convert_tokens_to_ids(name) for name in (END_OF_TEXT, "<|turn|>"))
    script = [*ids("go"), end, *ids("Hi.\n"), turn, *ids("And more")]
    model = scripted(script, len(tokenizer), max_length=60, page_size=4)
    engine = Engine(model, NoisyChain([script], 1.0, len(tokenizer), num_draft_tokens=count), tokenizer=tokenizer)
    stop = "\n<|turn|>"
    handle = engine.submit("go", SamplingParams(temperature=0, max_new_tokens=20, stop=stop, **changes))
    assert "".join(engine.stream(handle)) == handle.text == text
    assert (handle.finish_reason, handle.tokens) == ("stop", script[2:8])


@pytest.mark.parametrize("count", [0, 6])
@pytest.mark.parametrize("stop", [(), ("END",), ("\n", "€ enough")])
def test_streamed_pieces_join_to_the_text(count: int, stop: tuple[str, ...]) -> None:
    model, script = writer("ENough, a long text: 10 €, 漢字, EN€ and an END. Then more")
    engine = Engine(model, NoisyChain([script], 0.9, 266, num_draft_tokens=count), tokenizer=TOKENIZER)
    other = engine.submit("go", SamplingParams(temperature=0, max_new_tokens=20))
    handle = engine.submit("go", SamplingParams(temperature=0, max_new_tokens=56, stop=stop))
    pieces = list(engine.stream(handle))
    assert "".join(pieces) == handle.text and len(pieces) > 3 and "�" not in handle.text
    assert handle.text == ("ENough, a long text: 10 €, 漢字, EN€ and an " if "END" in stop else handle.text)
    assert other.finished, "the others advance too"
    assert list(engine.stream(handle)) == [handle.text], "a stream of a finished request gives its text"


@pytest.mark.parametrize("count", [0, 6])
@pytest.mark.parametrize(("least", "text"), [(0, "one "), (6, "one "), (7, "one END two "), (17, "one END two END 3")])
def test_stop_strings_within_min_new_tokens_are_streamed(count: int, least: int, text: str) -> None:
    model, script = writer("one END two END 3")
    engine = Engine(model, NoisyChain([script], 0.9, 266, num_draft_tokens=count), tokenizer=TOKENIZER)
    params = SamplingParams(temperature=0, max_new_tokens=17, min_new_tokens=least, stop=("END",))
    handle = engine.submit("go", params)
    assert "".join(engine.stream(handle)) == handle.text == text


def test_a_stream_that_is_cancelled_ends() -> None:
    model, _ = writer("abcdefghijkl")
    engine = Engine(model, tokenizer=TOKENIZER)
    handle = engine.submit("go", SamplingParams(temperature=0, max_new_tokens=12))
    shown = ""
    for piece in engine.stream(handle):
        shown += piece
        if len(shown) == 5:
            engine.cancel(handle)
    assert shown == handle.text == "abcde" and handle.finish_reason == "cancelled"


def test_the_tokenizer_s_end_token_is_not_text() -> None:
    end = TOKENIZER.convert_tokens_to_ids(END_OF_TEXT)
    script = [*ids("go"), *ids("done"), end, *ids("more")]
    engine = Engine(scripted(script, len(TOKENIZER)), tokenizer=TOKENIZER, eos_token_ids=(end,))
    handle = engine.generate(["go"], SamplingParams(temperature=0))[0]
    assert handle.text == "done" and handle.finish_reason == "eos" and handle.tokens[-1] == end


def test_step_mode_gives_its_reasons() -> None:
    engine = Engine(target(), get_drafter("ngram")())
    assert engine.step_mode == "sync"
    reasons = " ".join(engine.why_not_graph())
    assert "cpu" in reasons and "host" in reasons
    assert engine.step() == []

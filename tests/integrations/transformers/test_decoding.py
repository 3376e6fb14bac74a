"""Ends of texts, streamers, pipelines and threads: what users of `generate` see, compared with transformers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.transformers.conftest import TEXTS

from specdec_fast.engine.engine import Engine
from specdec_fast.integrations.transformers import attached

GREEDY = {"max_new_tokens": 24, "do_sample": False}


class Recorder:
    """A streamer that keeps all it gets."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.got: list[Any] = []
        self.fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.got) == self.fails_at:
            raise ConnectionError("the client left")
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


class Criterion:
    """A stopping criterion that keeps what it was asked, and looks at the batch as a whole."""

    def __init__(self, tokens: tuple[int, ...], whole: bool = False, eos: bool = True) -> None:
        self.asked: list[list[list[int]]] = []
        self.tokens, self.whole = tokens, whole
        if eos:
            self.eos_token_id = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked.append(input_ids.tolist())
        found = torch.isin(input_ids[:, -1], torch.tensor(self.tokens))
        return found.any().expand(len(input_ids)) if self.whole else found


@pytest.fixture(autouse=True)
def nothing_is_left(drafted: Any) -> Iterator[None]:
    """After every test the engine is idle, and the model usable outside of it."""
    yield
    assert attached(drafted).engine.idle
    assert drafted.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("rows", [1, 3])
def test_streamers_get_what_transformers_gives_them(rows: int, stock: Any, drafted: Any, batch: Any) -> None:
    inputs = {name: value[-rows:] for name, value in batch.items()}
    records = []
    for model in (stock, drafted):
        recorder = Recorder()
        model.generate(**inputs, **GREEDY, eos_token_id=[276, 608], streamer=recorder)
        records.append(recorder.got)
    assert records[0] == records[1]
    assert records[1].count("end") == 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_are_asked_as_in_transformers(
    rows: int, eos: bool, whole: bool, stock: Any, drafted: Any, batch: Any
) -> None:
    """Token by token, with all rows side by side; without an end-of-sequence id ended rows go on beside the others."""
    inputs = {name: value[-rows:] for name, value in batch.items()}
    results, asked = [], []
    for model in (stock, drafted):
        criterion = Criterion((276, 12, 608), whole, eos)
        ends = {"eos_token_id": 7} if eos else {"eos_token_id": None}
        model.generation_config.eos_token_id = 0 if eos else None
        try:
            results.append(model.generate(**inputs, **GREEDY, **ends, pad_token_id=0, stopping_criteria=[criterion]))
        finally:
            model.generation_config.eos_token_id = 0
        asked.append(criterion.asked)
    assert torch.equal(*results)
    assert asked[0] == asked[1]
    assert len(asked[0]) < 24, "the criterion ended nothing"


def test_rows_that_wait_for_a_place_end_too(stock: Any, drafted: Any, tokenizer: Any) -> None:
    """More rows than the engine runs at once, under criteria that look at rows alone and ones that do not."""
    inputs = tokenizer([f"{number} And the sons" for number in range(11)], return_tensors="pt", padding=True)
    for more in ({"stop_strings": [" of", "e"], "tokenizer": tokenizer}, {"stopping_criteria": [Criterion((276, 12))]}):
        expected = stock.generate(**inputs, **GREEDY, **more)
        assert torch.equal(drafted.generate(**inputs, **GREEDY, **more), expected)


def test_stop_strings(stock: Any, drafted: Any, batch: Any, tokenizer: Any) -> None:
    for strings in ("the", ["and", "sons"], ["no such text"]):
        more = {"stop_strings": strings, "tokenizer": tokenizer, **GREEDY}
        assert torch.equal(drafted.generate(**batch, **more), stock.generate(**batch, **more))


def test_time_ends_all_rows(drafted: Any, tokenizer: Any) -> None:
    inputs = tokenizer([*TEXTS, *TEXTS, *TEXTS, *TEXTS], return_tensors="pt", padding=True)
    found = drafted.generate(**inputs, max_new_tokens=500, do_sample=False, max_time=1e-3)
    assert inputs.input_ids.shape[1] < found.shape[1] < inputs.input_ids.shape[1] + 60


def test_a_shorter_max_length_of_the_user_counts(stock: Any, drafted: Any, one: Any) -> None:
    from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    for own in (MaxLengthCriteria(12), MaxLengthCriteria(3), EosTokenCriteria(276)):
        given = {**GREEDY, "stopping_criteria": StoppingCriteriaList([own])}
        assert torch.equal(drafted.generate(**one, **given), stock.generate(**one, **given))


def test_criteria_get_the_scores_so_far(stock: Any, drafted: Any, one: Any) -> None:
    counts: list[list[int]] = []

    def counting(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        counts[-1].append(len(scores))
        return scores[-1].max(-1).values > 19

    shapes = []
    for model in (stock, drafted):
        counts.append([])
        more = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [counting]}
        shapes.append(model.generate(**one, **GREEDY, **more).sequences.shape)
    assert counts[0] == counts[1]
    assert shapes[0] == shapes[1]


def test_text_streamers(stock: Any, drafted: Any, one: Any, tokenizer: Any, capsys: Any) -> None:
    from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

    text = tokenizer.decode(stock.generate(**one, **GREEDY)[0])
    drafted.generate(**one, **GREEDY, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == text + "\n"
    reader = TextIteratorStreamer(tokenizer, timeout=60)
    worker = threading.Thread(target=drafted.generate, kwargs={**one, **GREEDY, "streamer": reader})
    worker.start()
    assert "".join(reader) == text
    worker.join()

    async def read() -> str:
        reader = AsyncTextIteratorStreamer(tokenizer)
        worker = threading.Thread(target=drafted.generate, kwargs={**one, **GREEDY, "streamer": reader})
        worker.start()
        pieces = [piece async for piece in reader]
        worker.join()
        return "".join(pieces)

    if hasattr(asyncio, "timeout"):  # which transformers' streamer needs
        assert asyncio.run(read()) == text


class Broken:
    """A processor that fails at one length of the text."""

    def __init__(self, length: int, error: type[BaseException]) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise self.error("the processor broke")
        return scores


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_in_a_processor_reaches_the_caller_and_ends_the_stream(
    error: type[BaseException], stock: Any, drafted: Any, one: Any
) -> None:
    recorder = Recorder()
    with pytest.raises(error, match="the processor broke"):
        drafted.generate(**one, **GREEDY, logits_processor=[Broken(12, error)], streamer=recorder)
    assert recorder.got[-1] == "end"
    if error is KeyError:  # an interrupt loses the tokens of its step
        assert (
            recorder.got[1:-1]
            == stock.generate(**one, max_new_tokens=12 - one.input_ids.shape[1], do_sample=False)[
                0, one.input_ids.shape[1] :, None
            ].tolist()
        )
    assert torch.equal(drafted.generate(**one, **GREEDY), stock.generate(**one, **GREEDY))


def test_other_exceptions_end_the_stream_too(drafted: Any, one: Any, tokenizer: Any) -> None:
    """In the arguments, in a criterion, in the streamer itself. A reader in another thread would wait for ever."""
    from transformers import TextIteratorStreamer

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise KeyError("the criterion broke")

    for error, more in ((ValueError, {"nonsense": 1}), (KeyError, {"stopping_criteria": [broken]})):
        reader = TextIteratorStreamer(tokenizer, timeout=5, skip_prompt=True)
        with pytest.raises(error):
            drafted.generate(**one, **GREEDY, streamer=reader, **more)
        assert len(list(reader)) < 3
    recorder = Recorder(fails_at=4)
    with pytest.raises(ConnectionError):
        drafted.generate(**one, **GREEDY, streamer=recorder)
    assert recorder.got[-1] == "end"


def test_a_call_of_the_model_inside_of_a_step_is_refused(drafted: Any, one: Any) -> None:
    def nested(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if attached(drafted).engine._is_inside_step:
            drafted.generate(**one, max_new_tokens=2, do_sample=False)
        return scores

    with pytest.raises(RuntimeError, match="inside of one of its own steps"):
        drafted.generate(**one, **GREEDY, logits_processor=[nested])


def test_pipelines(stock: Any, drafted: Any, tokenizer: Any) -> None:
    from transformers import pipeline

    theirs = pipeline("text-generation", model=stock, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=drafted, tokenizer=tokenizer)
    assert ours(TEXTS[0], **GREEDY) == theirs(TEXTS[0], **GREEDY)
    assert ours(TEXTS, batch_size=2, **GREEDY) == theirs(TEXTS, batch_size=2, **GREEDY)
    template = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
    chat = [{"role": "user", "content": TEXTS[1]}]
    tokenizer.chat_template = template
    try:
        assert ours(chat, **GREEDY) == theirs(chat, **GREEDY)
        inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, add_generation_prompt=True)
        assert torch.equal(drafted.generate(**inputs, **GREEDY), stock.generate(**inputs, **GREEDY))
    finally:
        tokenizer.chat_template = None


def test_threads_share_the_engine(stock: Any, drafted: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several threads run in one batch. One that transformers would run waits for the others."""
    most, step = [0], Engine.step

    def watched(self: Engine, *args: Any, **more: Any) -> Any:
        time.sleep(1e-3)  # gives the other threads a turn
        found = step(self, *args, **more)
        most.append(self.num_running)
        return found

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(attached(drafted), "fallback", "transformers")
    inputs = [tokenizer(text, return_tensors="pt") for text in (*TEXTS, *TEXTS)]
    settings = [{**GREEDY, "num_beams": 1 + (at == 4)} for at in range(6)]
    found: dict[int, Any] = {}
    workers = [
        threading.Thread(target=lambda at=at: found.update({at: drafted.generate(**inputs[at], **settings[at])}))
        for at in range(6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for at in range(6):
        assert torch.equal(found[at], stock.generate(**inputs[at], **settings[at]))
    assert max(most) > 1, "calls ran one after another"

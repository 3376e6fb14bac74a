"""`load`: engines from folders and objects, and errors about parts that do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.toy_tokenizer import END_OF_TEXT, PIECES, byte_tokenizer

from specdec_fast import SamplingParams, load
from specdec_fast.loading import eos_ids, load_tokenizer
from specdec_fast.rules.best import LIKELIEST
from specdec_fast.targets.tiny_models import tiny_model

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a padded embedding and its tokenizer."""
    place = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", vocab_size=VOCAB + 6, eos_token_id=VOCAB - 1)
    model.save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft without the padding, of another family."""
    place = tmp_path_factory.mktemp("draft")
    tiny_model("gpt2", vocab_size=VOCAB, seed=2).save_pretrained(place)
    TOKENIZER.save_pretrained(place)
    return place


def test_ids_beyond_the_tokenizer_are_generated_if_they_are_asked_for(folder: Path) -> None:
    engine = load(str(folder), drafter="none", vocab_size=VOCAB + 6)
    assert engine.target.vocab_size == VOCAB + 6
    above = SamplingParams(temperature=0, max_new_tokens=2, allowed_token_ids=[VOCAB + 1])
    assert engine.generate(["the"], above)[0].tokens == [VOCAB + 1] * 2


def test_a_folder_makes_an_engine(folder: Path) -> None:
    engine = load(str(folder), max_length=128, max_rows=3, page_size=8, num_pages=40, prefill_chunk=7)
    assert engine.drafter.name == "auto" and engine.rule.name == "replay" and engine.eos_token_ids == (VOCAB - 1,)
    assert engine.target.vocab_size == VOCAB, "padding is cut at the tokenizer's length"
    assert engine.target.cache.pages.num_pages == 40 and engine.state.max_rows == 3
    assert engine._prefill_chunk == 7
    handle = engine.generate(["the thing"], SamplingParams(temperature=0, max_new_tokens=12))[0]
    assert handle.error is None and handle.text == TOKENIZER.decode(handle.tokens, skip_special_tokens=True)
    assert list(handle.prompt) == TOKENIZER.encode("the thing")


@pytest.mark.parametrize(("rule", "pick"), [("replay", "coupled"), ("rejection", "sampled"), ("greedy", "greedy")])
def test_the_draft_picks_as_the_rule_prefers(folder: Path, draft_folder: Path, rule: str, pick: str) -> None:
    engine = load(folder, draft_folder, rule=rule, num_draft_tokens=3, max_length=64)
    assert engine.drafter.name == "draft_model" and engine.drafter.pick == pick
    assert engine.drafter.num_draft_tokens == 3 and engine.drafter.model.max_length == 64
    want = load(folder, max_length=64).generate(["abc"], SamplingParams(temperature=0, max_new_tokens=10))[0]
    handle = engine.generate(["abc"], SamplingParams(temperature=0, max_new_tokens=10))[0]
    assert handle.tokens == want.tokens and handle.stats.num_draft_tokens > 0


@pytest.mark.parametrize(("temperature", "rule", "pick"), [(0.0, "greedy", "greedy"), (None, "block", "sampled")])
def test_the_best_rule_follows_the_temperature(temperature: float | None, rule: str, pick: str) -> None:
    engine = load(models.own("llama"), models.kin("llama"), rule="best", max_length=64, temperature=temperature)
    assert engine.rule.name == rule and engine.drafter.pick == pick


@pytest.mark.parametrize(("likeliest", "rule", "pick"), [(3.0, "replay", "greedy"), (1.0, "block", "sampled")])
def test_the_best_rule_follows_a_sample(
    likeliest: float, rule: str, pick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter picks as was found best, explain says the numbers, and the draft model is opened once."""
    means = {"block": 2.0, "rejection": 1.5, "replay": 1.25, LIKELIEST: likeliest}
    found = {way: torch.full((3,), mean, dtype=torch.float64) for way, mean in means.items()}
    sampled = []

    def sample(target: object, drafter: object, *more: object) -> dict[str, torch.Tensor]:
        sampled.append(drafter)
        return found

    monkeypatch.setattr("specdec_fast.loading.engine_builder.sample_ways", sample)
    model, requests = models.own("llama"), [(models.prompt(17), SamplingParams())]
    engine = load(model, models.kin("llama"), rule="best", max_length=64, sample=requests)
    assert engine.rule.name == rule and engine.drafter.pick == pick
    assert sampled[0].pick == "sampled" and sampled[0].model is engine.drafter.model
    assert "2.000 sampled, by block" in engine.explain() and f"{likeliest:.3f} of the likeliest" in engine.explain()
    load(model, models.kin("llama"), rule="best", max_length=64, sample=requests, temperature=0.0)
    load(model, models.kin("llama"), rule="rejection", max_length=64, sample=requests)
    settings = {"drafter_options": {"pick": "sampled"}, "max_length": 64}
    assert load(model, models.kin("llama"), rule="best", sample=requests, **settings).rule.name == "block"
    assert len(sampled) == 1, "no sample is drawn without a choice"
    assert sampled[0] is not engine.drafter, "what a drafter learnt of the sample would go on with it"
    made: list[SamplingParams] = []

    def typical(defaults: SamplingParams) -> list[Any]:
        made.append(defaults)
        return requests

    own = SamplingParams(temperature=0.7)
    chosen = load(model, models.kin("llama"), rule="best", sample=typical, sampling=own, max_length=64)
    assert chosen.rule.name == rule and made == [own]


def test_a_context_that_is_shorter_than_asked_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    limit = models.kin("llama").config.max_position_embeddings
    load(models.kin("llama"), max_length=limit + 5)
    assert f"max_length: got {limit + 5}; the model's limit is {limit}, and that is used" in caplog.text
    caplog.clear()
    short = tiny_model("llama", max_position_embeddings=64)
    load(tiny_model("llama"), short, max_length=80)
    assert "draft: its context is 64, the engine's 80; longer texts are decoded without drafts" in caplog.text
    caplog.clear()
    load(tiny_model("llama"), tiny_model("llama", seed=1), max_length=80)
    assert not caplog.records


@pytest.mark.parametrize("rule", ["replay", "best"])
def test_drafters_of_a_forest_have_draft_caches_of_their_own(rule: str) -> None:
    options = {"of": {"draft_model": {}, "draft_tree": {"widths": [2, 1], "how": "without_replacement"}}}
    asked = [(models.prompt(17), SamplingParams(max_new_tokens=8))]
    own = {"drafter": "forest", "drafter_options": options, "rule": rule, "sample": asked, "max_length": 64}
    engine = load(models.own("llama"), models.kin("llama"), eos_token_ids=(), **own)
    first, second = (each.model for each in engine.drafter.sources)
    assert first.cache is not second.cache
    assert engine.generate([models.prompt(17)], SamplingParams(seed=1, max_new_tokens=12))[0].stats.faults == 0


def test_a_drafter_by_name(folder: Path) -> None:
    engine = load(folder, drafter="ngram", max_length=64)
    assert engine.drafter.name == "ngram"
    assert load(folder, drafter="ngram", num_draft_tokens=2, max_length=64).drafter.num_draft_tokens == 2


def test_a_tokenizer_by_its_folder(folder: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCAB + 6)
    engine = load(model, tokenizer=folder, max_length=64)
    assert engine.encode("the thing") == TOKENIZER.encode("the thing") and engine.target.vocab_size == VOCAB
    with pytest.raises(ValueError, match="dtype: got 'fp8'; expected one of"):
        load(model, dtype="fp8")


def test_ends_beyond_the_vocabulary() -> None:
    """Such ids of the model are ignored; such ids of the caller are an error."""
    model = models.own("llama")
    model.generation_config.eos_token_id = [5, 96, -1]
    assert load(model, max_length=64).eos_token_ids == (5,)
    with pytest.raises(ValueError, match=r"eos_token_ids: got \(96,\); expected ids of the target's vocabulary, 0..95"):
        load(model, max_length=64, eos_token_ids=[96])


def test_tokenizers_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    tiny_model("llama", vocab_size=VOCAB, seed=2).save_pretrained(tmp_path)
    words = {word: index for index, word in enumerate([*PIECES, END_OF_TEXT])}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(kinds.WordLevel(words, unk_token="th"))).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="draft: its tokenizer differs from the target's") as error:
        load(folder, tmp_path, max_length=64)
    assert "expected the same vocabulary" in str(error.value) and "choose a draft of the same model family" in str(
        error.value
    )


def test_a_draft_without_a_tokenizer_is_accepted(folder: Path, tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=VOCAB, seed=2).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
    assert load(folder, tmp_path, max_length=64).drafter is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "draft_model"}, "drafter draft_model: got no draft model; expected draft="),
        ({"drafter": "ngrm"}, "drafter: got 'ngrm'; expected one of auto.*suffix, or none; did you mean 'ngram'"),
        ({"dtype": "bf16"}, "dtype: got 'bf16'; expected one of .*; did you mean 'bfloat16'"),
        ({"rule": "nothing"}, "rule: got 'nothing'; expected one of"),
        (
            {"drafter": "ngram", "draft": True},
            "got a draft model and drafter 'ngram'; expected draft_model or draft_tree",
        ),
        (
            {"num_draft_tokens": 4},
            "num_draft_tokens 4: got no drafter; pass draft=MODEL, or drafter=NAME, such as auto",
        ),
        ({"drafter_options": {"n_max": 3}}, "drafter_options: got {'n_max': 3} and no drafter"),
        ({"drafter": "ngram", "drafter_options": {"wish": 3}}, "drafter ngram: got option 'wish'; expected one of num"),
        ({"max_length": 0}, "max_length: got 0; expected at least 1"),
        ({"max_rows": "8"}, "max_rows: got '8'; expected at least 1, as an integer"),
        ({"max_length": 64.0}, "max_length: got 64.0; expected at least 1, as an integer"),
        ({"max_rows": True}, "max_rows: got True; expected at least 1"),
        ({"compile": "yes"}, "compile: got 'yes'; expected True or False"),
        ({"fused_forward": 1}, "fused_forward: got 1; expected True or False"),
        ({"prefix_sharing": 5}, "prefix_sharing: got 5; expected True or False"),
        ({"prefill_chunk": 0}, "prefill_chunk: got 0; expected a number of tokens, at least 1"),
        ({"drafter_options": 5}, "drafter_options: got 5; expected a dict of names and values, or None"),
        ({"temperature": -1}, "SamplingParams.temperature: got -1; expected 0 "),
        ({"adapter": ["a"]}, r"^adapter: got \['a'\]; expected the folder or hub id of a PEFT adapter"),
        ({"eos_token_ids": [1.5]}, r"eos_token_ids: got \(1.5,\); expected ids of the target's vocabulary"),
        ({"eos_token_ids": True}, r"eos_token_ids: got \(True,\); expected ids of the target's vocabulary"),
        ({"eos_token_ids": ["a"]}, r"eos_token_ids: got \('a',\); expected ids of the target's vocabulary"),
        ({"rule": 5}, "rule: got 5; expected a name .*replay"),
        ({"device": "cuda:99"}, r"device: got 'cuda:99'; this machine has \d+ CUDA devices; use cpu"),
        ({"device": "tpu"}, "device: got 'tpu'; expected cpu, cuda or cuda:N"),
        ({"page_size": 0}, "page_size: got 0; expected at least 1"),
        ({"num_pages": 1}, "num_pages: got 1; expected at least 2"),
        ({"draft": True, "num_draft_tokens": 0}, "^drafter draft_model: num_draft_tokens: got 0; expected at least 1"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    if arguments.get("draft") is True:
        arguments = arguments | {"draft": models.kin("llama")}
    with pytest.raises(ValueError, match=message):
        load(models.own("llama"), **({"max_length": 64} | arguments))


def test_a_single_end_id_needs_no_list() -> None:
    """As generation configs have it."""
    assert load(models.own("llama"), eos_token_ids=5, max_length=64).eos_token_ids == (5,)


def test_options_reach_the_drafter() -> None:
    made: Any = load(models.own("llama"), drafter="ngram", drafter_options={"n_max": 3, "num_draft_tokens": 5}).drafter
    assert made.num_draft_tokens == 5 and list(made._sizes) == [3, 2]
    engine = load(models.own("llama"), models.kin("llama"), drafter="draft_tree", drafter_options={"widths": [2, 1]})
    tree: Any = engine.drafter
    assert tree.shape.parents == (-1, 0, 0, 1, 2) and tree.num_draft_tokens == 4 and tree.how == "coupled"


def test_where_end_ids_come_from() -> None:
    model = models.own("llama")
    model.generation_config.eos_token_id = [4, 7]
    assert eos_ids(model, None) == (4, 7)
    model.generation_config.eos_token_id = 5
    assert eos_ids(model, None) == (5,)
    model.generation_config.eos_token_id = None
    assert eos_ids(model, None) == (0,), "the configuration's"
    model.config.eos_token_id = None
    assert eos_ids(model, TOKENIZER) == (VOCAB - 1,) and eos_ids(model, None) == ()


def test_best_lets_a_drafter_pick_as_the_selected_rule_prefers() -> None:
    engine = load("demo-target", drafter="medusa", rule="best", max_rows=1)
    assert engine.rule.name == "replay" and engine.drafter.pick == "coupled"
    assert load("demo-target", "demo-draft", rule="best", max_rows=1).drafter.pick == "sampled"


def test_a_bundled_head_has_a_name() -> None:
    engine = load("demo-target", drafter="eagle3", drafter_options={"head": "demo-eagle3"}, max_rows=1)
    assert engine.drafter.name == "eagle3"

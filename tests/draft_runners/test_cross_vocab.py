"""Draft models with another tokenizer: translation between vocabularies, and unchanged texts."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter, load
from specdec_fast.draft_runners.cross_vocab import CrossVocab, GrowingText
from specdec_fast.interfaces import Budget
from specdec_fast.targets.tiny_models import tiny_model

PAIRS = ["th", "he", "in", "er", "ab", "AB", "zz"]


def letters(alphabet: Sequence[str], pairs: Sequence[str] = ()) -> Any:
    """A tokenizer of single letters and pairs of them, numbered in this order behind an end of text."""
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: at for at, token in enumerate(["<end>", *alphabet, *pairs])}
    core = Tokenizer(kinds.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in pairs]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)


ALPHABET = [chr(32 + at) for at in range(95)]
OURS = letters(ALPHABET)
TURNED = letters(ALPHABET[::-1])
FEWER = letters(string.ascii_letters + " ", PAIRS)


WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog"]


def metaspace(scheme: str) -> Any:
    """Like sentencepiece: words with the space in front of them, which the decoder drops at the beginning. scheme: of
    the pre-tokenizer, or "normalizer" for one that puts a space in front of everything, as older models do.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    pieces = ["<end>", "<unk>", *(f"▁{word}" for word in WORDS), *string.ascii_lowercase, "▁", "é", "€"]
    core = Tokenizer(kinds.Unigram([(each, -5.0 if len(each) == 1 else -1.0) for each in pieces], unk_id=1))
    if scheme == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def byte_level() -> Any:
    """Like GPT-2: bytes, and the words with a space in front."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    tokens, merges = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())], []
    for word in WORDS:
        for at in range(len(word)):
            merges.append(("Ġ" + word[:at], word[at]))
            tokens.append("Ġ" + word[: at + 1])
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    core = Tokenizer(kinds.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)


def pairs_from_the_right() -> Any:
    """Digits in groups of two from the right: one more digit moves all of them."""
    from tokenizers import Regex, pre_tokenizers

    made = letters(ALPHABET, [*(f"{at}{to}" for at in range(10) for to in range(10))])
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{2}(?=(\d{2})*(?!\d))"), "isolated")
    return made


def turned_twin() -> Any:
    """The target itself, its ids in the order of the turned tokenizer."""
    twin = models.own("llama")
    order = torch.tensor([0, *range(95, 0, -1)])
    with torch.no_grad():
        for layer in (twin.get_input_embeddings(), twin.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order].clone())
    return twin


def engine_of(mode: str, small: Any, theirs: Any, rule: str = "replay", pick: str = "coupled") -> Engine:
    target = models.target("llama", max_rows=5)
    draft = HuggingFaceTarget(small, max_rows=5, max_length=320, vocab_size=len(theirs))
    between = CrossVocab(OURS, theirs, target.vocab_size, draft.vocab_size)
    made = get_drafter("draft_model")(draft, pick=pick, tokenizers=mode, translation=between)
    return Engine(target, made, rule=rule, tokenizer=OURS)


PROMPTS = ["a", "the other", "AB zz in the", "Hello, 42!", "th"]
PARAMS = [
    SamplingParams(temperature=t, seed=at, max_new_tokens=16 + at) for at, t in enumerate((0.0, 0.7, 1.0, 1.0, 0.0))
]


def plain() -> list[list[int]]:
    return [handle.tokens for handle in Engine(models.target("llama"), tokenizer=OURS).generate(PROMPTS, PARAMS)]


def test_common_tokens_and_texts_pass() -> None:
    between = CrossVocab(OURS, FEWER, 96, len(FEWER))
    assert between.target_ids.shape == between.draft_ids.shape == (54,)  # letters, space, end of text
    text = OURS.encode("the zz!")
    assert FEWER.decode(between.to_draft(OURS.encode("the zz"))) == "the zz"
    assert FEWER.convert_ids_to_tokens(between.to_draft(OURS.encode("the zz"))) == ["th", "e", " ", "zz"]
    new = between.to_target(text, between.to_draft(text), FEWER.convert_tokens_to_ids(["th", "e", "ab"]))
    assert OURS.decode(new) == "theab" and len(new) == 5
    logits = torch.arange(float(len(FEWER)))[None]
    dist = between.to_target_logits(logits)
    assert dist.shape == (1, 96) and int(torch.isfinite(dist).sum()) == 54
    ids = OURS.convert_tokens_to_ids(["q", " ", "<end>"])
    assert dist[0, ids].tolist() == [float(at) for at in FEWER.convert_tokens_to_ids(["q", " ", "<end>"])]
    assert between.to_draft_ids(torch.tensor(ids)).tolist() == FEWER.convert_tokens_to_ids(["q", " ", "<end>"])
    assert between.to_draft([]) == [0]


def test_text_that_would_merge_at_the_border_is_encoded_alone() -> None:
    """The target would write the last letter and the draft's first one as a single token."""
    pairs = letters(ALPHABET, ["ab"])
    between = CrossVocab(pairs, OURS, len(pairs), 96)
    new = between.to_target(pairs.encode("xa"), OURS.encode("xa"), OURS.encode("bc"))
    assert pairs.decode(new) == "bc"


@pytest.mark.parametrize("scheme", ["first", "always", "normalizer"])
def test_drafted_words_keep_the_space_in_front_of_them(scheme: str) -> None:
    """A decoder drops the first space of a text. It must not drop the space of drafted words."""
    ours, theirs = byte_level(), metaspace(scheme)
    between = CrossVocab(ours, theirs, len(ours), len(theirs))
    text = ours.encode("the cat sat")
    drafted = theirs.convert_tokens_to_ids(["▁on", "▁the", "▁mat"])
    assert between.to_target(text, between.to_draft(text), drafted) == ours.encode(" on the mat")
    back = CrossVocab(theirs, ours, len(theirs), len(ours))
    text, drafted = theirs.encode("the cat sat"), ours.encode(" on the mat")
    assert back.to_target(text, back.to_draft(text), drafted) == theirs.encode("on the mat")


TEXTS: dict[str, list[str]] = {
    "words": [f" {word}" for word in WORDS],
    "letters": list(string.ascii_lowercase + "   "),
    "characters": [" the", " cat", "é", "€", " ", "  ", "th"],
    "unknown": [" the", " cat", "日"],
    "digits": list(string.digits),
}
KINDS: list[tuple[str, Any, Any, int]] = [  # pieces of the text, tokenizers, most whole translations of 100
    ("words", byte_level, lambda: metaspace("first"), 20),
    ("words", byte_level, lambda: metaspace("always"), 20),
    ("words", byte_level, lambda: metaspace("normalizer"), 20),
    ("words", lambda: metaspace("first"), byte_level, 20),
    ("letters", byte_level, lambda: metaspace("first"), 30),
    ("letters", lambda: OURS, lambda: FEWER, 30),
    ("characters", byte_level, lambda: metaspace("first"), 30),
    ("characters", lambda: metaspace("normalizer"), byte_level, 30),
    ("unknown", byte_level, lambda: metaspace("first"), 100),
    ("digits", lambda: OURS, pairs_from_the_right, 100),
]


@pytest.mark.parametrize(("pieces", "ours", "theirs", "most"), KINDS)
def test_a_growing_text_is_translated_as_if_it_were_whole(pieces: str, ours: Any, theirs: Any, most: int) -> None:
    """In steps of a few tokens, whole characters or not; the end alone is encoded wherever that is as good."""
    source, target, draft = random.Random(3), ours(), theirs()
    between = CrossVocab(target, draft, len(target), len(draft))
    tokens = target.encode("".join(source.choice(TEXTS[pieces]) for _ in range(500)), add_special_tokens=False)
    growing, encode, encoded, wholes, at = GrowingText(between), between.encode, list[str](), 0, 1
    between.encode = lambda text: (encoded.append(text), encode(text))[1]  # type: ignore[method-assign]
    for _ in range(100):
        found, whole = growing.to_draft(tokens[:at]), target.decode(tokens[:at])
        assert found == (encode(whole) or [0])
        wholes, at = wholes + (whole in encoded), at + source.randrange(2, 8)
        encoded.clear()
    assert at < len(tokens) and wholes <= most


@pytest.mark.parametrize("pick", ["coupled", "greedy"])
def test_with_all_tokens_in_common_tli_is_the_same_draft(pick: str) -> None:
    """The twin under other ids: under replay it is never corrected where it is coupled."""
    engine = engine_of("tli", turned_twin(), TURNED, pick=pick)
    handles = engine.generate(PROMPTS, PARAMS)
    assert [handle.tokens for handle in handles] == plain() and engine.stats.faults == 0
    assert all(
        "recovered" not in handle.origins for handle in handles if pick == "coupled" or handle.params.temperature == 0
    )


@pytest.mark.parametrize("mode", ["tli", "slem"])
def test_texts_do_not_change_in_a_ragged_batch(mode: str) -> None:
    small = tiny_model("gpt2", vocab_size=len(FEWER) + 3, max_position_embeddings=512)
    engine = engine_of(mode, small, FEWER)
    for _ in range(2):
        assert [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)] == plain()
    assert engine.stats.faults == 0 and engine.stats.num_draft_tokens > 50
    assert engine.drafter.model.cache.pages.num_used == 0


def test_slem_proposes_the_text_that_the_draft_would_generate() -> None:
    engine = engine_of("slem", turned_twin(), TURNED)
    handles = engine.generate(PROMPTS, [SamplingParams(temperature=0, max_new_tokens=20)] * 5)
    assert engine.stats.tau > 3 and all("recovered" not in handle.origins for handle in handles)


def test_sampled_tokens_come_from_the_restricted_distribution() -> None:
    """Under the rejection rule: accepted about as often as the overlap of the distributions says, with penalties on
    the way.
    """
    engine = engine_of("tli", turned_twin(), TURNED, rule="rejection", pick="sampled")
    params = SamplingParams(seed=3, max_new_tokens=30, repetition_penalty=1.2)
    handles = engine.generate(PROMPTS, params)
    assert engine.stats.alpha > 0.97 and all(len(handle.tokens) == 30 for handle in handles)
    with torch.inference_mode():
        state = engine.state
        row = state.join(OURS.encode("the"), params, 3, ())
        engine.drafter.begin(state, [row], None)
        draft = engine.drafter.propose(state, [row], Budget([3]), state.rng([row]))
        draft.check(96)
        assert draft.dists is not None and draft.dists.logits.shape[1] == 96


def test_rows_that_draft_nothing_are_not_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, encoded = engine_of("tli", turned_twin(), TURNED), list[str]()
    encode = CrossVocab.encode
    monkeypatch.setattr(CrossVocab, "encode", lambda self, text: (encoded.append(text), encode(self, text))[1])
    with torch.inference_mode():
        state, params = engine.state, SamplingParams(temperature=0, seed=1)
        rows = [state.join(OURS.encode(prompt), params, 3, ()) for prompt in ("the", "other")]
        engine.drafter.begin(state, rows, None)
        assert engine.drafter.propose(state, rows, Budget([0, 2]), state.rng(rows)).counts == (1, 3)
    assert encoded == ["other"]


def test_models_on_disk(tmp_path: Path) -> None:
    """Other tokenizers are refused with the option that takes them; with it they load."""
    for name, model, tokenizer in (("target", models.own("llama"), OURS), ("draft", turned_twin(), TURNED)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    target, draft = tmp_path / "target", tmp_path / "draft"
    with pytest.raises(ValueError, match=r"tokenizer differs .* option tokenizers=tli or tokenizers=slem"):
        load(target, draft, max_length=128)
    for mode in ("tli", "slem"):
        engine = load(target, draft, drafter_options={"tokenizers": mode}, max_length=128, eos_token_ids=())
        assert [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)] == plain() and engine.stats.tau > 1.3
    with pytest.raises(ValueError, match="translation: got no tokenizer of the draft"):
        load(target, turned_twin(), drafter_options={"tokenizers": "tli"}, max_length=128)


def test_bad_options_are_named() -> None:
    small = models.target("llama")
    with pytest.raises(ValueError, match="tokenizers: got 'other'; expected one of same, tli, slem"):
        get_drafter("draft_model")(small, tokenizers="other")
    with pytest.raises(ValueError, match="tokenizers: got 'tli' without a translation"):
        get_drafter("draft_model")(small, tokenizers="tli")
    with pytest.raises(ValueError, match="translation: got tokenizers without a common token"):
        CrossVocab(_without_end("abc"), _without_end("xyz"), 96, 96)


def _without_end(alphabet: str) -> Any:
    class Plain:
        def get_vocab(self) -> dict[str, int]:
            return {letter: at for at, letter in enumerate(alphabet)}

    return Plain()

"""GGUF files: written here as llama.cpp's converter stores models, and loaded by every name that people use."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.gguf_files import ARCHITECTURES, write_gguf
from oracles.toy_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from specdec_fast import SamplingParams, load
from specdec_fast.cli import main
from specdec_fast.loading import lacks_chat_template, load_model, load_tokenizer
from specdec_fast.loading.gguf_reader import readable_architectures
from specdec_fast.targets.tiny_models import tiny_model

gguf = pytest.importorskip("gguf")
TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def tiny(family: str = "llama", **overrides: Any) -> Any:
    return tiny_model(family, vocab_size=VOCAB, eos_token_id=VOCAB - 1, **overrides)


def text_of(model: Any, prompt: str, count: int = 12) -> list[int]:
    """The greedy text of transformers' own generate."""
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    settings = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=VOCAB - 1)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return found[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """A llama with a tokenizer, in a folder of its own."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, TOKENIZER)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_is_the_model_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    loaded: Any = load_model(write_gguf(tmp_path / "x.gguf", model, TOKENIZER))
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("Q8_0", 0.01), ("Q4_0", 0.2)])
def test_quantized_weights_are_converted(kind: str, error: float, model: Any, tmp_path: Path) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER, kind=kind)
    loaded: Any = load_model(place, "bfloat16")
    assert loaded.dtype == torch.bfloat16
    exact: Any = load_model(place)
    own, stored = model.model.layers[1].mlp.up_proj.weight, exact.model.layers[1].mlp.up_proj.weight
    difference = float(((own - stored).abs().mean() / own.std()).detach())
    assert 0 < difference < error
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, stored.bfloat16())


def test_every_name_of_a_file_loads_it(file: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = text_of(model, "the thing")
    unnamed = file.with_name("sha256-0a")  # files of a store carry no suffix
    unnamed.write_bytes(file.read_bytes())
    monkeypatch.chdir(file.parent)
    names = [file, str(file), file.parent, file.name, unnamed]
    for name in names:
        handle = load(name, max_length=64).generate(["the thing"], GREEDY)[0]
        assert handle.error is None and handle.tokens == want, name
    unnamed.unlink()


def test_tokens_and_ends_come_along(tmp_path: Path, model: Any) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.bos_token = tokenizer.pad_token = "END"
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 7}
    place = write_gguf(tmp_path / "x.gguf", model, tokenizer, header=ends)
    loaded = load_tokenizer(place)
    assert TOKENIZER.get_vocab().items() <= loaded.get_vocab().items()
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.bos_token == "END" and loaded("the thing").input_ids[0] == loaded.bos_token_id
    assert loaded.encode("the thing", add_special_tokens=False) == TOKENIZER.encode("the thing")
    engine = load(place, max_length=64)
    assert engine.eos_token_ids == (VOCAB - 1, 7), "the end of a turn ends a text too"
    assert engine.target.vocab_size == VOCAB


def test_a_beginning_that_transformers_leaves_out_is_an_error(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases before 5.23 do so."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.bos_token = "END"
    place = write_gguf(tmp_path / "x.gguf", model, tokenizer)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    with pytest.raises(
        ValueError, match="asks for a beginning of sequence, which this release of transformers leaves out"
    ):
        load_tokenizer(place)


@pytest.mark.parametrize("by_folder", [False, True])
def test_drafts_and_tokenizers_may_be_files(by_folder: bool, file: Path, model: Any, tmp_path: Path) -> None:
    draft = write_gguf(tmp_path / "draft.gguf", tiny(seed=2), TOKENIZER, kind="Q8_0")
    if by_folder:  # its tokenizer lacks what the converter adds
        TOKENIZER.save_pretrained(tmp_path / "target")
        model.save_pretrained(tmp_path / "target")
    engine = load(tmp_path / "target" if by_folder else file, draft, num_draft_tokens=3, max_length=64)
    handle = engine.generate(["the thing"], GREEDY)[0]
    assert handle.tokens == text_of(model, "the thing") and handle.stats.num_draft_tokens > 0
    assert load(tiny(), tokenizer=file, max_length=64).encode("the thing") == TOKENIZER.encode("the thing")


def test_the_command_line_loads_files(file: Path, model: Any) -> None:
    options = ["--model", str(file), "-T", "0", "--max-new-tokens", "12", "--json"]
    result = CliRunner().invoke(main, ["generate", "the thing", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"][0]["tokens"] == text_of(model, "the thing")
    assert result.stderr == "", "no bar of the conversion"


def test_a_large_file_is_announced(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_fast.commands.open_engine._LARGE_FILE", 1)
    options = ["--model", str(file), "-T", "0", "--max-new-tokens", "2", "--dtype", "bfloat16"]
    result = CliRunner().invoke(main, ["generate", "the thing", *options])
    assert re.search(
        r"note: converting tiny.gguf \(\d+ MB\) to bfloat16; a folder of safetensors loads fas", result.stderr
    )


def test_headers_are_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of real files take seconds."""
    parsed, own = [], gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda *args: parsed.append(args) or own(*args))
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    load(file, max_length=64)
    assert len(parsed) == 1 and (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, names)


# -- what cannot be loaded ------------------------------------------------------------------------------------------


def test_a_folder_with_several_files_names_them(file: Path, tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf", "mmproj-b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(
        ValueError, match=r"model: got the folder .* with 2 GGUF files; expected one; name the file, su"
    ):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"a-Q4_0.gguf \(a-Q4_0.gguf, b-Q8_0.gguf\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "a-Q4_0.gguf").unlink()
    assert load_model(tmp_path).config.model_type == "llama", "a projector of images is no model"
    tiny_model("qwen2", vocab_size=VOCAB).save_pretrained(tmp_path)
    assert load_model(tmp_path).config.model_type == "qwen2", "a checkpoint of transformers goes first"


def test_a_part_of_a_file_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "x-00001-of-00003.gguf"
    part.write_bytes(file.read_bytes())
    renamed = write_gguf(tmp_path / "renamed.gguf", tiny(), TOKENIZER, header={"split.count": 3})
    monkeypatch.setattr("transformers.utils.hub.cached_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=r"renamed.gguf', one of 3 parts of a split GGUF file; expected a single file"):
        load(renamed)
    renamed.unlink()
    for name in (part, tmp_path, "owner/name:Q8/x-00001-of-00003.gguf"):
        with pytest.raises(ValueError, match="one part of a split GGUF file; expected a single file; join the parts"):
            load(name)


@pytest.mark.parametrize("kept", [0, 2, 40, 0.02, 0.5, 0.999])
def test_a_broken_file_is_refused(kept: float, file: Path, tmp_path: Path) -> None:
    whole, broken = file.read_bytes(), tmp_path / "x.gguf"
    broken.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    for call, what in ((load, "model"), (load_tokenizer, "tokenizer")):
        with pytest.raises(
            ValueError, match=rf"^{what}: got '.*x.gguf', which is (no complete|not a) GGUF file \(.*; download"
        ):
            call(broken)


def test_another_file_is_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\3\4" + file.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"model.gguf', which is not a GGUF file \(it begins with b'PK\\x03\\x04'\)"):
        load(other)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"PK\3\4")
    with pytest.raises(
        ValueError, match=rf"model: got the file '.*safetensors'; expected .*; name its folder: {tmp_path}"
    ):
        load(other)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/x.gguf", "which does not exist; expected a .gguf file of this machine, or owner/name:file"),
        ("x.gguf", "which does not exist"),
        ("owner/name:Q4_K_M", "write owner/name:FILE.gguf, as its page lists it"),
    ],
)
def test_names_of_no_file_are_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=f"model: got '{name}'.*{words}"):
        load(name)


def test_a_file_on_the_hub_is_fetched(file: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def cached_file(repository: str, name: str, **options: Any) -> str:
        asked.append((repository, name, options.get("revision")))
        return str(file)

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    engine = load("owner/name:Q8/x.gguf", revision="v1", max_length=64)
    assert engine.generate(["the thing"], GREEDY)[0].tokens == text_of(model, "the thing")
    assert {*asked} == {("owner/name", "Q8/x.gguf", "v1")}


def test_a_file_on_the_hub_that_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_file(*_: object, **__: object) -> str:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    with pytest.raises(ValueError, match=r"model: got 'owner/name:x.gguf'; .*: We couldn't connect to the hub"):
        load("owner/name:x.gguf")


@pytest.mark.parametrize("architecture", ["rwkv9", "mistral", "general"])
def test_an_architecture_that_cannot_be_read_is_named(architecture: str, model: Any, tmp_path: Path) -> None:
    """transformers lists the last two, and cannot read them."""
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER, architecture=architecture)
    words = f"a GGUF file of architecture '{architecture}'; expected one that transformers reads"
    with pytest.raises(
        ValueError, match=rf"model: got '.*x.gguf', {words} \(.*llama, .*, qwen2moe, .*\); use the original checkp"
    ):
        load(place)


def test_a_file_without_weights_is_refused_before_a_model_is_built(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")  # transformers' default sizes: a model of 28 GB
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match=r"a GGUF file of 0 tensors without token_embd\.weight; expected the weights of"
    ):
        load_model(tmp_path / "vocab.gguf")


def test_every_architecture_of_these_tests_can_be_read() -> None:
    known = readable_architectures()
    assert {*ARCHITECTURES.values(), "gemma2", "gpt-oss", "qwen2moe", "qwen3moe"} <= {*known}
    assert known == sorted(known) and "tokenizer" not in known


def test_a_name_that_transformers_takes_for_an_architecture(model: Any, tmp_path: Path) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER, header={"general.name": "mistral"})
    with pytest.raises(ValueError, match=r"model_type: mistral .*; expected an architecture that transformers reads; "):
        load(place)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("mamba", "weights lack .* tensors of the arch"), ("t5", "a model of another kind; expected a decoder-o")],
)
def test_a_model_of_another_kind_is_refused(architecture: str, words: str, model: Any, tmp_path: Path) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER, architecture=architecture)
    with pytest.raises(ValueError, match=words) as raised:
        load(place)
    assert str(raised.value).startswith("model")


def test_weights_of_an_unknown_type_are_named(model: Any, tmp_path: Path) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER)
    content, name = bytearray(place.read_bytes()), b"blk.0.attn_q.weight"
    at = content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)
    at += 4 + 8 * content[at]  # behind the shape
    content[at : at + 4] = (99).to_bytes(4, "little")
    place.write_bytes(content)
    words = (
        r"with weights of a type that the package gguf does not know: .*99.*; expected a quantization type that tran"
    )
    for call in (load, load_tokenizer):
        with pytest.raises(ValueError, match=f"x.gguf', {words}.*; update gguf, or convert the file with llama-quan"):
            call(place)


def test_a_quantization_that_cannot_be_converted_is_named(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER, kind="Q8_0")

    def dequantize(*_: object) -> None:
        raise NotImplementedError("Dequantization for TQ9_0 is not yet implemented")

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(
        ValueError, match=r"TQ9_0 is not yet implemented; expected a quantization type .*llama-quantize"
    ):
        load(place)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(package: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package} is not installed; expected the extra 'gguf'; .*\[gguf\]"):
        load(file)


def test_a_tokenizer_that_cannot_be_made_is_named(file: Path, tmp_path: Path, model: Any) -> None:
    place = write_gguf(tmp_path / "x.gguf", model, TOKENIZER)
    place.write_bytes(place.read_bytes().replace(b"gpt2", b"bert"))
    with pytest.raises(
        ValueError, match=r"whose tokenizer cannot be read .*; pass tokenizer= with the folder or hub id"
    ):
        load(place)
    assert load(place, tokenizer=file, max_length=64).tokenizer is not None


def test_the_loader_of_transformers_takes_these_files(file: Path, model: Any) -> None:
    """The files of this test are files as others read them too."""
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    assert text_of(theirs, "the thing") == text_of(model, "the thing")


def test_a_chat_template_is_found_without_the_weights(model: Any, tmp_path: Path) -> None:
    bare = write_gguf(tmp_path / "x.gguf", model, TOKENIZER)
    chats = write_gguf(tmp_path / "y.gguf", model, TOKENIZER, header={"tokenizer.chat_template": "{{ messages }}"})
    assert lacks_chat_template(bare) and not lacks_chat_template(chats)
    assert not lacks_chat_template(tmp_path / "none.gguf"), "the error is that of the loader"

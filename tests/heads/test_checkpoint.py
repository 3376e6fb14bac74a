"""Checkpoints of heads: every public Medusa layout as its producer writes it, and possible faults."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from oracles.medusa_producer import HIDDEN, VOCAB, Sizes, producer, states
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec_fast.heads.checkpoint import load_tensors, open_checkpoint, weight_files
from specdec_fast.heads.checkpoint_medusa import load_medusa, save_medusa
from specdec_fast.heads.medusa import MedusaHeads


def config(folder: Path, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def same(heads: MedusaHeads, made: nn.ModuleList, lm_head: Any = None) -> None:
    """Checks that the loaded heads compute the same as the producer's modules."""
    x = states()
    want = torch.stack([lm_head(head(x)) if lm_head is not None else head(x) for head in made])
    torch.testing.assert_close(heads(x, lm_head), want)


def load(folder: Path, **sizes: int) -> MedusaHeads:
    num_heads = sizes.pop("num_heads", None)
    return load_medusa(folder, Sizes(**sizes), num_heads)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_fasterdecoding_v01_with_the_config_that_says_two(tmp_path: Path, suffix: str, layers: int) -> None:
    """The published files. The number of heads must be given, because config and file disagree."""
    made = producer(layers=layers)
    config(tmp_path, base_model_name_or_path="lmsys/vicuna-7b-v1.3", medusa_num_heads=2, medusa_num_layers=layers)
    if suffix == "pt":
        torch.save(made.state_dict(), tmp_path / "medusa_lm_head.pt")
    else:
        save_file(made.state_dict(), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(
        ValueError, match=r"config\.json: medusa_num_heads is 2, but the file holds 5 heads; .*option num_heads=5"
    ):
        load(tmp_path)
    heads = load(tmp_path, num_heads=5)
    assert (heads.num_heads, heads.num_layers) == (5, layers)
    same(heads, made)
    fewer = load(tmp_path, num_heads=2)
    assert torch.equal(fewer(states()), heads(states())[:2])
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"got num_heads={wrong}; expected 1 to 5, which the file holds"):
            load(tmp_path, num_heads=wrong)


def test_a_v2_file_with_more_heads_than_its_config_says(tmp_path: Path) -> None:
    config(tmp_path, medusa_num_heads=2, medusa_num_layers=1, version="2")
    torch.save(producer(5, projection=False).state_dict(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"config\.json: medusa_num_heads is 2, but the file holds 5 heads"):
        load(tmp_path)
    assert load(tmp_path, num_heads=3).num_heads == 3


def test_fasterdecoding_v2_reads_the_projection_of_the_target(tmp_path: Path) -> None:
    made, own = producer(3, projection=False), nn.Linear(HIDDEN, VOCAB, bias=False)
    config(tmp_path, base_model_name_or_path="x", medusa_num_heads=3, medusa_num_layers=1, version="2")
    torch.save(made.state_dict(), tmp_path / "medusa_lm_head.pt")
    heads = load(tmp_path)
    assert heads.lm_head is None
    same(heads, made, own)
    with pytest.raises(ValueError, match="heads without projections; expected lm_head"):
        heads(states())


def backbone() -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": torch.ones(4, HIDDEN),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
    }


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_fasterdecoding_v10_in_the_shards_of_a_whole_model(tmp_path: Path, suffix: str) -> None:
    made = producer(3)
    tensors = backbone() | {f"medusa_head.{key}": value for key, value in made.state_dict().items()}
    config(tmp_path, model_type="llama", hidden_size=HIDDEN, medusa_num_heads=3, medusa_num_layers=1)
    stem = "pytorch_model" if suffix == "bin" else "model"
    names = sorted(tensors)
    shards = {f"{stem}-0000{at + 1}-of-00002.{suffix}": names[at::2] for at in range(2)}
    for shard, keys in shards.items():
        held = {key: tensors[key].clone() for key in keys}
        torch.save(held, tmp_path / shard) if suffix == "bin" else save_file(held, tmp_path / shard)
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {key: shard for shard, keys in shards.items() for key in keys},
    }
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    same(load(tmp_path), made)
    (tmp_path / sorted(shards)[1]).unlink()
    with pytest.raises(ValueError, match=r"index\.json: it names .*-00002-of-00002.*not in the folder"):
        load(tmp_path)


def vllm_tensors(made: nn.ModuleList, prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors that vLLM's converter writes: no bias unless medusa_fc_bias."""
    tensors = {}
    for head, stack in enumerate(made):
        parts = list(stack)  # type: ignore[call-overload]
        for layer, block in enumerate(parts[:-1]):
            tensors[f"{prefix}blocks.{head}.layers.{layer}.weight"] = block.linear.weight.detach()
            if block.linear.bias is not None:
                tensors[f"{prefix}blocks.{head}.layers.{layer}.bias"] = block.linear.bias.detach()
        tensors[f"{prefix}lm_heads.{head}.weight"] = parts[-1].weight.detach()
    return tensors


def vllm_config(folder: Path, **fields: Any) -> None:
    known = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3}
    config(folder, **{**known, "num_hidden_layers": 1, "max_paths": 64, "topk": 10, **fields})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm(tmp_path: Path, prefix: str, bias: bool) -> None:
    made = producer(3)
    for stack in made if not bias else ():
        stack[0].linear.bias = None  # type: ignore[index]
    vllm_config(tmp_path, truncated_vocab_size=VOCAB, original_lm_head=False, medusa_fc_bias=bias)
    save_file(vllm_tensors(made, prefix), tmp_path / "model.safetensors")
    heads = load(tmp_path)
    assert (heads.bias is not None) == bias
    same(heads, made)


@pytest.mark.parametrize("cut", [True, False])
def test_vllm_with_a_reduced_vocabulary(tmp_path: Path, cut: bool) -> None:
    """token_map lists the tokens that are left; the projections are reduced already, or whole."""
    made, ids = producer(3), torch.tensor([0, 2, 3, 28])
    tensors = vllm_tensors(made) | {"token_map": ids}
    if cut:
        tensors |= {key: value[ids].clone() for key, value in tensors.items() if key.startswith("lm_heads")}
    vllm_config(tmp_path, truncated_vocab_size=4)
    save_file(tensors, tmp_path / "model.safetensors")
    heads = load(tmp_path)
    assert heads.token_ids is not None and heads.token_ids.tolist() == ids.tolist()
    x = states()
    torch.testing.assert_close(heads(x), torch.stack([head(x) for head in made])[..., ids])
    del tensors["token_map"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="truncated_vocab_size is 4, but the file has no key 'token_map'"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_with_one_projection_for_all_heads(tmp_path: Path, key: str) -> None:
    made, own = producer(3, projection=False), nn.Linear(HIDDEN, VOCAB, bias=False)
    tensors = {
        f"blocks.{head}.layers.0.{what}": getattr(stack[0].linear, what).detach()  # type: ignore[index]
        for head, stack in enumerate(made)
        for what in ("weight", "bias")
    }
    vllm_config(tmp_path, original_lm_head=True, medusa_fc_bias=True)
    save_file(tensors | {key: own.weight.detach()}, tmp_path / "model.safetensors")
    x, want = states(), torch.stack([own(head(x)) for head in made for x in [states()]])
    found = load(tmp_path)
    assert found.lm_head is not None and len(found.lm_head) == 1, "one copy for all heads"
    torch.testing.assert_close(found(x), want)
    save_medusa(found, tmp_path / "again", base_model="x", layout="vllm", dtype=torch.float32)
    torch.testing.assert_close(load(tmp_path / "again")(x), want)
    same_as_target = load_medusa(tmp_path, Sizes(lm_head=own.weight.detach().clone()))
    assert same_as_target.lm_head is None, "a copy of the target's projection takes no memory"
    torch.testing.assert_close(same_as_target(x, own), want)
    other = own.weight.detach().clone()
    other[VOCAB - 1, 3] += 0.01
    assert load_medusa(tmp_path, Sizes(lm_head=other)).lm_head is not None


def test_projections_over_padding_are_cut(tmp_path: Path) -> None:
    """The rows of a projection may be those of the target's embedding, or its token ids alone."""
    made = producer(2)
    config(tmp_path, medusa_num_heads=2, medusa_num_layers=1)
    save_file(made.state_dict(), tmp_path / "medusa_lm_head.safetensors")
    x = states()
    want = torch.stack([head(x) for head in made])
    for cut in (VOCAB, VOCAB - 3):
        heads = load_medusa(tmp_path, Sizes(vocab_size=cut))
        assert heads.vocab_size == cut
        torch.testing.assert_close(heads(x), want[..., :cut])
    with pytest.raises(ValueError, match=r"projection of head 0 is \[29, 12\]; expected \[25, 12\], the target's voc"):
        load_medusa(tmp_path, Sizes(vocab_size=25))


@pytest.mark.parametrize(
    ("layout", "own", "reduced"), [("fasterdecoding", True, 0), ("fasterdecoding", False, 0), ("vllm", True, 0),
                                   ("vllm", False, 0), ("vllm", True, 7)]
)  # fmt: skip
def test_a_saved_head_is_reloaded_equal(tmp_path: Path, layout: str, own: bool, reduced: int) -> None:
    torch.manual_seed(1)
    heads = MedusaHeads(HIDDEN, VOCAB, 3, num_layers=2, own_lm_head=own, token_ids=reduced or None)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    if heads.token_ids is not None:
        heads.token_ids.copy_(torch.arange(reduced) * 3)
    shared = torch.randn(VOCAB, HIDDEN)
    save_medusa(heads, tmp_path, base_model="x", layout=layout, dtype=torch.float32, lm_head=shared)
    again = load(tmp_path)
    x = states()
    assert torch.equal(again(x, lambda y: y @ shared.T), heads(x, lambda y: y @ shared.T))
    assert not list(tmp_path.glob("*.partial"))
    assert layout == "vllm" or (json.loads((tmp_path / "config.json").read_text()).get("version") == "2") == (not own)


# -- faults: (change to a valid folder, message)

SOUND = {"medusa_num_heads": 5, "medusa_num_layers": 1}


def spoil_v01(folder: Path, change: Callable[[dict[str, Tensor]], None], **fields: Any) -> None:
    tensors = dict(producer().state_dict())
    change(tensors)
    config(folder, **{**SOUND, **fields})
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "medusa_lm_head.safetensors")


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], str]] = {
    "missing": (lambda t: t.pop("3.0.linear.bias"), {}, r"missing: 3\.0\.linear\.bias"),
    "missing projection": (lambda t: t.pop("2.1.weight"), {}, r"missing: 2\.1\.weight"),
    "extra": (lambda t: t.update({"0.0.norm.weight": torch.ones(2)}), {}, r"key '0\.0\.norm\.weight' is of no known"),
    "misshapen": (
        lambda t: t.update({"1.0.linear.weight": torch.ones(HIDDEN, 7)}),
        {},
        r"1\.0\.linear\.weight is \[12, 7\]; expected \[12, 12\]",
    ),
    "vocabulary": (
        lambda t: t.update({"4.1.weight": torch.ones(40, HIDDEN)}),
        {},
        r"head 4 is \[40, 12\]; expected \[29, 12\]",
    ),
    "not finite": (lambda t: t["0.0.linear.bias"].fill_(float("nan")), {}, "not finite"),
    "too few heads": (lambda t: None, {"medusa_num_heads": 6}, "medusa_num_heads is 6, but the file holds 5 heads"),
    "layers": (lambda t: None, {"medusa_num_layers": 3}, "medusa_num_layers is 3, but the heads of the file have 1"),
    "field of another type": (
        lambda t: None,
        {"medusa_num_heads": "5"},
        "field 'medusa_num_heads' is '5'; expected int",
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_faults_are_named(tmp_path: Path, case: str) -> None:
    change, fields, message = WRONG[case]
    spoil_v01(tmp_path, change, **fields)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    spoil_v01(tmp_path, lambda tensors: None)
    with pytest.raises(ValueError, match="hidden size is 12, the target's is 16; take heads that were trained"):
        load(tmp_path, hidden_size=16)
    with pytest.raises(ValueError, match=r"head 0 is \[29, 12\]; expected \[33, 12\]"):
        load(tmp_path, vocab_size=33)


def test_vllm_config_of_two_heads_over_a_file_of_five(tmp_path: Path) -> None:
    vllm_config(tmp_path, num_heads=2)
    save_file(vllm_tensors(producer(5)), tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"config\.json: num_heads is 2, but the file holds 5 heads; expected the same"
    ):
        load(tmp_path)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path(__file__).with_name("sprung"), "x"))


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    config(tmp_path, **SOUND)
    torch.save({"0.0.linear.weight": Trap()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt: it holds pickled code or objects, and they are not run"):
        load(tmp_path)
    assert not Path(__file__).with_name("sprung").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_truncated_file(tmp_path: Path, suffix: str) -> None:
    file, state = tmp_path / f"medusa_lm_head.{suffix}", producer().state_dict()
    torch.save(state, file) if suffix == "pt" else save_file(state, file)
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"medusa_lm_head\.{suffix}: this is no whole"):
        load(tmp_path)


def test_places_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"got nothing; expected medusa_lm_head\.safetensors or"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json: this is no JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no key of model\.safetensors belongs to such a head"):
        load(tmp_path)
    with pytest.raises(ValueError, match="a file; expected the folder that it is in"):
        load(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no such folder, and no hub id"):
        load(Path("/no/such/folder"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"got 'some/heads'.*or a hub id that is reachable from here.*name the folder"):
        load_medusa("some/heads", Sizes())


@pytest.mark.parametrize("shards", [False, True])
def test_a_hub_id_downloads_only_the_files_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    """Configuration and weights in either format, whole or in shards with their index, are downloaded, and no other
    file.
    """
    made, hub, cache = producer(3), tmp_path / "hub", tmp_path / "cache"
    config(hub, medusa_num_heads=3, medusa_num_layers=1)
    tensors = {key: value.clone() for key, value in made.state_dict().items()}
    if shards:
        names = [f"medusa_lm_head-0000{at}-of-00002.safetensors" for at in (1, 2)]
        for at, name in enumerate(names):
            save_file({key: tensors[key] for key in sorted(tensors)[at::2]}, hub / name)
        mapped = {key: names[at % 2] for at, key in enumerate(sorted(tensors))}
        (hub / "medusa_lm_head.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    else:
        save_file(tensors, hub / "medusa_lm_head.safetensors")
    for name in ("README.md", "optimizer.pt", "other.safetensors", "tokenizer.json"):
        (hub / name).write_text("x")
    asked: list[str] = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append(repo)
        cache.mkdir()
        for file in filter_repo_objects([each.name for each in hub.iterdir()], allow_patterns=allow_patterns):
            shutil.copy(hub / file, cache / file)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(load_medusa("some/heads", Sizes()), made)
    wanted = {each.name for each in hub.iterdir() if each.name.startswith(("medusa", "config"))}
    assert asked == ["some/heads"] and {each.name for each in cache.iterdir()} == wanted


def test_fill_names_every_misfit() -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"missing: bias; nothing reads: x; weight is \[3, 2\], expected \[2, 3\]"):
        load_tensors(module, {"weight": torch.ones(3, 2), "x": torch.ones(1)}, "y")
    load_tensors(module, {"weight": torch.ones(2, 3, dtype=torch.bfloat16)}, "y", optional=["bias"])
    assert module.weight.dtype == torch.float32 and bool((module.weight == 1).all())


def test_the_first_existing_name_counts(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        save_file({name: torch.ones(1)}, tmp_path / name)
    assert weight_files(tmp_path, ("a.safetensors", "b.safetensors")) == [tmp_path / "a.safetensors"]
    assert list(open_checkpoint(tmp_path, names=("b.safetensors",)).tensors) == ["b.safetensors"]

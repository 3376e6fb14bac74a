"""EAGLE-3 heads as public repositories vary them: served as their formulas say, or refused by the feature's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.eagle_formulas import first_draft, first_eagle3_token
from torch import Tensor

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.checkpoint_eagle import load_eagle3, save_eagle3

WHOLE = {key: value for key, value in heads.LAYER.items() if key != "head_dim"}
REDUCED = {**heads.LAYER, "draft_vocab_size": len(heads.KEPT)}
IDS = "eagle_aux_hidden_state_layer_ids"
CHAIN = {"shape": (-1, 0), "depth": 0}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
PROMPT = models.prompt(17)
BLAME = ("is this a head for this target", "expected an EAGLE-3 head")


def tensors_of(states: int = 3, seed: int = 0, **extra: Tensor) -> dict[str, Tensor]:
    """Tensors of a head with a reduced vocabulary. states: 0 leaves fc out."""
    found = heads.eagle3_tensors(seed, aux_hidden_states=states or 1) | extra
    if not states:
        del found["fc.weight"]
    return found


def without_projection(states: int = 3) -> dict[str, Tensor]:
    return {key: value for key, value in tensors_of(states).items() if key not in ("lm_head.weight", "d2t", "t2d")}


def reduced(tensors: dict[str, Tensor]) -> Any:
    """Returns the projection of a reduced head as logits over the target's ids."""

    def project(hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), heads.VOCAB), float("-inf"))
        logits[:, heads.KEPT] = hidden @ tensors["lm_head.weight"].T
        return logits

    return project


def over_target(hidden: Tensor) -> Tensor:
    logits: Tensor = models.untouched("llama").get_output_embeddings()(hidden)
    return logits


def drafted(folder: Path, target: Any = None, **options: Any) -> tuple[int, Any, Any]:
    """Returns the first draft token behind the prompt, the head, and the statistics. The text must be the target's."""
    target = models.target("llama", max_rows=1) if target is None else target
    drafter: Any = make_drafter("eagle3", {"head": str(folder), **CHAIN, **options}, target=target)
    token, handle = first_draft(Engine(target, drafter), PROMPT, GREEDY)
    assert handle.tokens == models.greedy_text("llama", 17, 12) and handle.stats.faults == 0
    assert handle.stats.num_draft_tokens > 5
    return token, drafter.model.head, handle.stats


STATES = {
    "inputs": (3, {IDS: [1, 0, 1]}, ("entering:1", "entering:0", "entering:1")),
    "boundaries": (3, {IDS: [0, 1, 2]}, ("entering:0", "entering:1", "entering:2")),
    "outputs of SGLang": (3, {"eagle_config": {IDS: [1, 0, -1]}}, ("entering:2", "entering:1", "entering:0")),
    "boundaries of NVIDIA": (2, {"eagle_config": {IDS: [2, 1]}}, ("entering:2", "entering:1")),
    "one": (1, {IDS: [1]}, ("entering:1",)),
    "one without fc": (0, {IDS: [2]}, ("entering:2",)),
    "four": (4, {IDS: [0, 1, 2, 1]}, ("entering:0", "entering:1", "entering:2", "entering:1")),
    "final": (1, {"eagle_config": {"use_aux_hidden_state": False}}, ("final_norm",)),
    "final without fc": (0, {"eagle_config": {"use_aux_hidden_state": False, IDS: [1]}}, ("final_norm",)),
}


@pytest.mark.parametrize("states", list(STATES))
def test_the_states_that_a_head_reads(tmp_path: Path, states: str) -> None:
    count, fields, names = STATES[states]
    tensors = tensors_of(count)
    token, head, _ = drafted(heads.write(tmp_path, {**REDUCED, **fields}, tensors))
    assert head.aux_hidden_states == names and (head.fc is None) == (count == 0)
    assert token == first_eagle3_token(tensors, PROMPT, names, reduced(tensors))


def test_the_number_of_layers_decides_between_two_conventions(tmp_path: Path) -> None:
    """Of twelve layers, [6, 9, 12] cannot be outputs, [2, 6, 9] are the authors' inputs, and [1, 5, 8] are outputs."""
    target = type("Target", (), {"num_layers": 12, "hidden_size": 64, "num_embeddings": 96, "vocab_size": 96})()
    for at, (nested, want) in enumerate(
        (([6, 9, 12], [6, 9, 12]), ([2, 6, 9], [2, 6, 9]), ([1, 5, 8], [2, 6, 9]), ([0, 5, 11], [1, 6, 12]))
    ):
        folder = heads.write(tmp_path / str(at), {**REDUCED, "eagle_config": {IDS: nested}}, tensors_of())
        assert load_eagle3(folder, target).aux_hidden_states == tuple(f"entering:{index}" for index in want)


@pytest.mark.parametrize("columns", [None, heads.VOCAB])
def test_a_head_without_a_projection_uses_the_target_s(tmp_path: Path, columns: int | None) -> None:
    tensors = without_projection()
    config = {**WHOLE, "draft_vocab_size": columns, IDS: [0, 1, 2]}
    token, head, _ = drafted(heads.write(tmp_path, config, tensors))
    assert head.lm_head is None and not any(key.startswith(("lm_head", "embed")) for key in head.state_dict())
    assert token == first_eagle3_token(tensors, PROMPT, ("entering:0", "entering:1", "entering:2"), over_target)


@pytest.mark.parametrize("kind", ["copy", "half-precision copy", "its own", "its own, padded"])
def test_a_projection_over_all_ids_is_copied_only_if_it_differs(tmp_path: Path, kind: str) -> None:
    target = models.target("llama", max_rows=1)
    table = target.model.get_output_embeddings().weight.detach().clone().contiguous()
    if kind == "half-precision copy":
        table = table.bfloat16()
    if kind.startswith("its own"):
        table = table + 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(2))
    padded = torch.cat([table, torch.zeros(32, 64)]) if "padded" in kind else table
    tensors = without_projection() | {"lm_head.weight": padded}
    config = {**WHOLE, "vocab_size": len(padded), IDS: [0, 1, 2]}
    token, head, _ = drafted(heads.write(tmp_path, config, tensors), target)
    own = kind.startswith("its own")
    assert (head.lm_head is not None) == own and (not own or torch.equal(head.lm_head.weight, table))
    names = ("entering:0", "entering:1", "entering:2")
    assert token == first_eagle3_token(tensors, PROMPT, names, (lambda x: x @ table.T) if own else over_target)


def test_padding_of_the_target_is_never_drafted(tmp_path: Path) -> None:
    """The embedding has 96 rows, the tokenizer 60 ids; the projection of the head covers all rows."""
    tensors = without_projection() | {"lm_head.weight": 3 * torch.randn(96, 64)}
    folder = heads.write(tmp_path, {**WHOLE, IDS: [0, 1, 2]}, tensors)
    target = HuggingFaceTarget(models.own("llama"), max_rows=1, max_length=64, vocab_size=60)
    drafter: Any = make_drafter("eagle3", {"head": str(folder), "depth": 3, "width": 8}, target=target)
    handle = Engine(target, drafter).generate([[token % 60 for token in PROMPT]], GREEDY)[0]
    assert handle.stats.faults == 0 and handle.stats.num_draft_tokens > 50 and max(handle.tokens) < 60


def test_a_tied_projection_is_the_head_s_own_embedding(tmp_path: Path) -> None:
    own = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))
    tensors = without_projection() | {"embed_tokens.weight": own}
    config = {**WHOLE, IDS: [0, 1, 2], "tie_word_embeddings": True}
    token, head, _ = drafted(heads.write(tmp_path / "own", config, tensors))
    assert head.lm_head.weight is head.embed_tokens.weight
    names = ("entering:0", "entering:1", "entering:2")
    assert token == first_eagle3_token(tensors, PROMPT, names, lambda x: x @ own.T, embedding=own)
    with pytest.raises(ValueError, match=r"'tie_word_embeddings' is true, but .* set the field to false if the head"):
        drafted(heads.write(tmp_path / "none", config, without_projection()))


@pytest.mark.parametrize("where", ["top", "nested", "keys alone"])
def test_norms_and_biases_follow_from_flags_or_keys(tmp_path: Path, where: str) -> None:
    """NVIDIA nests `norm_before_fc`; a norm whose flag is missing was trained all the same."""
    source = torch.Generator().manual_seed(3)
    tensors = tensors_of(
        **{"input_norm.weight": 0.5 + torch.rand(192, generator=source), "fc.bias": torch.randn(64, generator=source)}
    )
    flags = {"top": {"norm_before_fc": True}, "nested": {"eagle_config": {"norm_before_fc": True}}, "keys alone": {}}
    token, head, _ = drafted(heads.write(tmp_path, {**REDUCED, IDS: [0, 1, 2], **flags[where]}, tensors))
    assert head.input_norm is not None and head.fc.bias is not None
    assert token == first_eagle3_token(tensors, PROMPT, ("entering:0", "entering:1", "entering:2"), reduced(tensors))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sliding_window_of_llama_layers(tmp_path: Path, seed: int) -> None:
    """As `speculators` trains heads by default: transformers' Llama layers ignore the field."""
    tensors, names = tensors_of(seed=seed), ("entering:0", "entering:1", "entering:2")
    window = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    token, head, _ = drafted(heads.write(tmp_path, {**REDUCED, IDS: [0, 1, 2], **window}, tensors))
    assert head.windows == [{"sliding_window": 4}]
    found = {w: first_eagle3_token(tensors, PROMPT, names, reduced(tensors), window=w) for w in (3, 4, 5, None)}
    assert token == found[4]
    assert len(set(found.values())) > 1, "the window makes no difference to this head"


def test_other_spellings_of_keys_and_fields(tmp_path: Path) -> None:
    """`model.` before keys, vLLM's name of d2t, layer types of the whole target, sections of multimodal positions."""
    tensors, names = tensors_of(), ("entering:1", "entering:0", "entering:1")
    spelt = {
        {"d2t": "draft_id_to_target_id"}.get(key, key if key in ("t2d", "lm_head.weight") else f"model.{key}"): value
        for key, value in tensors.items()
    }
    fields = {
        IDS: [1, 0, 1],
        "layer_types": ["full_attention"] * 36,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    token, head, _ = drafted(heads.write(tmp_path, {**REDUCED, **fields}, spelt))
    assert token == first_eagle3_token(tensors, PROMPT, names, reduced(tensors)) and head.windows == [{}]
    twice = spelt | {"fc.weight": tensors["fc.weight"].clone()}
    with pytest.raises(ValueError, match=r"got 'fc\.weight' under two names"):
        drafted(heads.write(tmp_path / "twice", {**REDUCED, **fields}, twice))


@pytest.mark.parametrize("states", ["boundaries", "final", "final without fc", "four"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_variant_is_written_and_read_back(tmp_path: Path, states: str, shares: bool) -> None:
    count, fields, names = STATES[states]
    target = models.target("llama", max_rows=1)
    config, tensors = (WHOLE, without_projection(count)) if shares else (REDUCED, tensors_of(count))
    if not count:
        tensors.pop("fc.weight", None)
    head = load_eagle3(heads.write(tmp_path / "a", {**config, **fields}, tensors), target)
    save_eagle3(tmp_path / "b", head)
    again = load_eagle3(tmp_path / "b", target)
    assert again.aux_hidden_states == names and set(head.state_dict()) == set(again.state_dict())
    for key, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def _add(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda config, tensors: tensors.update({key: torch.zeros(shape).to(dtype)})


def _flags(**fields: Any) -> Any:
    return lambda config, tensors: config.update(eagle_config={IDS: [0, 1, 2], **fields})


def _many(*changes: Any) -> Any:
    return lambda config, tensors: [change(config, tensors) for change in changes]


def _drop(*keys: str) -> Any:
    return lambda config, tensors: [tensors.pop(key) for key in keys]


REFUSED = {
    "latent attention": (_add("midlayer.self_attn.kv_a_proj_with_mqa.weight", 4, 64), r"got latent attention \(MLA\)"),
    "experts": (_add("midlayer.mlp.experts.0.up_proj.weight", 4, 64), "got a mixture of experts"),
    "parallel drafting": (_add("mask_hidden", 1, 192), r"got parallel drafting \(P-EAGLE\)"),
    "scales": (
        _add("midlayer.mlp.up_proj.weight_scale", 1),
        r"got quantized weights \(midlayer\.mlp\.up_proj\.weight_sc",
    ),
    "eight bits": (
        _add("midlayer.mlp.up_proj.weight", 96, 64, dtype=torch.float8_e4m3fn),
        r"got quantized weights \(midlayer\.mlp\.up_proj\.weight is float8_e4m3fn\); expected float32, bfloat16",
    ),
    "other layers": (lambda config, tensors: config.update(model_type="gpt_oss"), "model_type: got 'gpt_oss'"),
    "no norm of the embedding": (_flags(use_input_layernorm_in_first_layer=False), "an embedding without a norm"),
    "no norm of the output": (_flags(use_last_layernorm=False), "an output without a norm"),
    "norms of another kind": (_flags(use_mtp_layernorm=True), "norms as in multi-token prediction"),
    "final state, three read": (
        _flags(use_aux_hidden_state=False),
        r"reads 3 hidden states .*; expected the final one",
    ),
    "two named, three read": (
        lambda config, tensors: config.update({IDS: [0, 1]}),
        r"got layers \[0, 1\], but the head reads 3 hidden states \(fc\.weight has 192 columns\)",
    ),
    "two read, none named": (
        _many(_add("fc.weight", 64, 128), lambda config, tensors: config.pop(IDS)),
        rf"got no {IDS} for a head that reads 2 hidden states .*; add the field, or name the layers by option layers=",
    ),
    "no fc, none named": (
        _many(_drop("fc.weight"), lambda config, tensors: config.pop(IDS)),
        r"missing: fc\.weight; .* of the final state alone, set use_aux_hidden_state=false",
    ),
    "no such layer": (
        lambda config, tensors: config.update({IDS: [0, 1, 3]}),
        r"inputs of layers \[0, 1, 3\]; expected numbers from 0 to 2 \(behind the last layer\) for a target of 2",
    ),
    "no projection of a reduced vocabulary": (
        _drop("lm_head.weight"),
        r"missing: lm_head\.weight; .*drafts 64 of the target's 96 ids: only heads over all ids can use the target's",
    ),
    "offsets over all ids": (
        _many(
            _add("lm_head.weight", 96, 64),
            lambda c, t: (c.pop("draft_vocab_size"), t.update(d2t=torch.ones(96).long())),
        ),
        r"d2t is \[96\] for 96 columns; expected zeros for a head over all ids",
    ),
    "no norm of the states": (_drop("midlayer.hidden_norm.weight"), r"got no hidden_norm\.weight"),
    "surplus": (_add("odd.weight", 1), "nothing reads: odd.weight; .* its layout is not supported"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_not_served_is_named(tmp_path: Path, what: str) -> None:
    change, message = REFUSED[what]
    config, tensors = {**REDUCED, IDS: [0, 1, 2]}, tensors_of()
    change(config, tensors)
    target = models.target("llama", max_rows=1)
    with pytest.raises(ValueError, match=message) as caught:
        load_eagle3(heads.write(tmp_path, config, tensors), target)
    assert not any(words in str(caught.value) for words in BLAME), "the head is not to blame"


@pytest.mark.parametrize("layers", [[1], [1, 1, 1]])
def test_layers_by_option_must_be_as_many_as_the_head_reads(tmp_path: Path, layers: Sequence[int]) -> None:
    folder = heads.write(tmp_path, {**REDUCED, "eagle_config": {"use_aux_hidden_state": False}}, tensors_of(1))
    target = models.target("llama", max_rows=1)
    if len(layers) == 1:
        assert load_eagle3(folder, target, layers).aux_hidden_states == ("entering:1",)
        return
    with pytest.raises(ValueError, match=r"got layers \[1, 1, 1\], but the head reads 1 hidden state \(fc"):
        load_eagle3(folder, target, layers)

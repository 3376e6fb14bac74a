"""Public layouts of EAGLE heads, recognised by their configuration and keys.

| layout | config.json | keys |
|---|---|---|
| EAGLE-1, EAGLE-2 | of the layer; `bias` absent means true | `fc.*`, `layers.0.*`, `embed_tokens.weight` |
| EAGLE-3 as published | `draft_vocab_size` | `fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d` |
| SGLang, SpecForge | the same and `eagle_config` | the same, or `layers.0.*` in place of `midlayer.*` |
| speculators | `speculators_model_type`, `transformer_layer_config` | `layers.0.*`, norms, `embed_tokens` |
| the same, of EAGLE-1 | and `layernorms`, `fusion_bias` (absent: none) | `fusion_fc.*`, `transformer.*`, norms |

There are two conventions for the layers that EAGLE-3 reads: the input of layer i (EAGLE, vLLM, speculators), and the
output of layer i (SGLang, SpecForge), which is the input of layer i + 1.
Tests: tests/heads/test_checkpoint_eagle.py, test_broken_eagle.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.heads.checkpoint import Checkpoint, load_tensors, open_checkpoint, refuse_other_size, write_checkpoint
from specdec_fast.heads.eagle import EagleHead
from specdec_fast.heads.eagle3 import Eagle3Head

FILE = "model.safetensors"
_RENAMED = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),  # vLLM's name, and below those of what `speculators` converts
    (re.compile(r"^embed_layernorm\."), "embedding_layernorm."),
    (re.compile(r"^hidden_layernorm\."), "layers.0.input_layernorm."),
    (re.compile(r"^lm_head_layernorm\."), "pre_lm_head_layernorm."),
)
_DROPPED = re.compile(r"rotary_emb\.|^verifier_|^t2d$")


def load_eagle(source: str | Path, target: Any) -> EagleHead:
    """Loads an EAGLE-1 or EAGLE-2 head for a target.

    Args:
        source: Folder or hub id.
        target: The target.

    Returns:
        The head.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    found = open_checkpoint(source)
    if "d2t" in found.tensors or any(key.endswith("hidden_norm.weight") for key in found.tensors):
        raise ValueError(f"head {source}: got an EAGLE-3 head; expected an EAGLE-1 or EAGLE-2 head; use drafter eagle3")
    described = _layer_fields(found)
    _check_lossless_settings(found)
    _check_target(found, described, target)
    tensors = _rename_tensors(found)
    named, usual = ("fusion_bias", False) if "speculators_model_type" in found.config else ("bias", True)
    bias = found.field(named, bool, usual)
    norms = found.field("layernorms", bool, "embedding_layernorm.weight" in tensors)
    head = EagleHead(_config(found, described), bias=bias, layernorms=norms)
    embedding = tensors.pop("embed_tokens.weight", None)  # a copy of the target's, which is used in its place
    if embedding is not None and embedding.shape[1] != head.hidden_size:
        raise ValueError(
            f"head {source}: embed_tokens.weight is {list(embedding.shape)}; expected {head.hidden_size} columns"
        )
    tensors.pop("lm_head.weight", None)
    load_tensors(head, tensors, found.source)
    return head


def load_eagle3(source: str | Path, target: Any, layers: Sequence[int] | None = None) -> Eagle3Head:
    """Loads an EAGLE-3 head for a target.

    Args:
        source: Folder or hub id.
        target: The target.
        layers: Layers whose inputs the head reads, in place of those in config.json.

    Returns:
        The head.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    found = open_checkpoint(source)
    described = _layer_fields(found)
    _check_lossless_settings(found)
    tensors = _rename_tensors(found)
    _check_target(found, described, target, own_embedding="embed_tokens.weight" in tensors)
    if "lm_head.weight" not in tensors or not any(key.endswith("hidden_norm.weight") for key in tensors):
        raise ValueError(
            f"head {source}: got no lm_head.weight or no hidden_norm.weight; expected an EAGLE-3 head (drafter eagle "
            "reads those of EAGLE-1 and EAGLE-2)"
        )
    columns = int(tensors["lm_head.weight"].shape[0])
    drafted = found.field("draft_vocab_size", int, columns)
    if drafted != columns:
        raise ValueError(
            f"{found.folder / 'config.json'}: field 'draft_vocab_size' is {drafted}, lm_head.weight has {columns} "
            "rows; expected the same; correct the file"
        )
    vocab = found.field("vocab_size", int, target.vocab_size, among=described)
    head = Eagle3Head(
        _config(found, described),
        vocab_size=vocab,
        draft_vocab_size=columns,
        aux_hidden_states=_aux_hidden_states(found, target.num_layers, layers),
        target_hidden_size=target.hidden_size,
        own_embedding="embed_tokens.weight" in tensors,
        **{
            name: found.field(name, bool, False)
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )
    if columns < vocab and "d2t" not in tensors:
        raise ValueError(
            f"head {source}: missing: d2t; expected {columns} offsets from its {columns} columns to the {vocab} ids of "
            "the target"
        )
    load_tensors(head, tensors, found.source, optional=("d2t",))
    _check_ids(found, head, target.vocab_size)
    return head


def save_eagle(
    folder: Path, head: EagleHead, facts: Mapping[str, Any] | None = None, embedding: Tensor | None = None
) -> None:
    """Writes a head in the layout of published EAGLE-1 and EAGLE-2 heads.

    Args:
        folder: The folder.
        head: The head.
        facts: Further fields of config.json.
        embedding: The target's embedding [V, hidden], which published files contain too. `load_eagle` does not use it.
    """
    tensors = {key: value for key, value in head.state_dict().items() if not _DROPPED.search(key)}
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.to(head.fc.weight.dtype)
    described = {**_config_fields(head), "architectures": ["LlamaForCausalLM"], "bias": head.fc.bias is not None}
    write_checkpoint(folder, {**described, **(facts or {})}, tensors, FILE)


def save_eagle3(folder: Path, head: Eagle3Head, facts: Mapping[str, Any] | None = None) -> None:
    """Writes a head in the layout of published EAGLE-3 heads, with layer ids as vLLM and SGLang read them.

    Args:
        folder: The folder.
        head: The head.
        facts: Further fields of config.json.
    """
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", key): value for key, value in head.state_dict().items()}
    columns = head.token_ids
    if columns is None:
        del tensors["d2t"]
    else:
        there = torch.zeros(head.vocab_size, dtype=torch.bool, device=columns.device)
        tensors["t2d"] = there.index_fill_(0, columns, True)
    ids = [int(name.partition(":")[2]) for name in head.aux_hidden_states]
    extra = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": head.fc.in_features // len(ids),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in ids],
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.input_norm is not None,
        "fc_norm": head.fc_norm is not None,
        "norm_output": head.norm_output,
    }
    write_checkpoint(folder, {**_config_fields(head), **extra, **(facts or {})}, tensors, FILE)


def _config_fields(head: Any) -> dict[str, Any]:
    """Fields of config.json that describe a head's layers."""
    fields: dict[str, Any] = {key: value for key, value in head.config.to_dict().items() if not key.startswith("_")}
    fields["dtype"] = str(next(head.parameters()).dtype).partition(".")[2]
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:  # older programs look for it here
        fields["rope_theta"] = rope["rope_theta"]
    return fields


def _layer_fields(found: Checkpoint) -> dict[str, Any]:
    """The fields that describe the layers: config.json, or the object that `speculators` nests in it."""
    kind = found.config.get("speculators_model_type")
    if kind is None:
        return dict(found.config)
    if kind not in ("eagle", "eagle3"):
        raise ValueError(
            f"{found.folder / 'config.json'}: field 'speculators_model_type' is {kind!r}; expected 'eagle' or 'eagle3'"
        )
    inner = found.field("transformer_layer_config", dict)
    if inner is None:
        raise ValueError(f"{found.folder / 'config.json'}: no field 'transformer_layer_config'; download it again")
    return dict(inner)


def _config(found: Checkpoint, described: Mapping[str, Any]) -> Any:
    """The transformers configuration of the layers. Raises ValueError."""
    from transformers import AutoConfig

    fields = {key: value for key, value in described.items() if key not in ("architectures", "transformers_version")}
    kind = str(fields.pop("model_type", None) or "llama")
    if kind == "llama" and fields.get("qkv_bias"):
        kind = "qwen2"
    if "num_hidden_layers" not in fields:
        fields["num_hidden_layers"] = 1
    layers = {int(key.split(".")[1]) for key in _rename_tensors(found) if key.startswith("layers.")}
    if layers and len(layers) != fields["num_hidden_layers"]:
        raise ValueError(
            f"{found.folder / 'config.json'}: field 'num_hidden_layers' is {fields['num_hidden_layers']}, the file has "
            f"{len(layers)}; expected the same; correct the file"
        )
    try:
        return AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{found.folder / 'config.json'}: got layers that cannot be read: {error}") from None


def _rename_tensors(found: Checkpoint) -> dict[str, Tensor]:
    """The tensors by our names, without those that are not needed."""
    renamed: dict[str, Tensor] = {}
    for key, value in found.tensors.items():
        if _DROPPED.search(key):
            continue
        for pattern, name in _RENAMED:
            key = pattern.sub(name, key)
        renamed[key] = value
    return renamed


def _check_target(found: Checkpoint, described: Mapping[str, Any], target: Any, own_embedding: bool = False) -> None:
    """Checks sizes against the target. A head with its own embedding may have another width. Raises ValueError."""
    hidden, rows = target.hidden_size, target.num_embeddings
    remedy = "use a head that was trained for this target"
    read = found.field("target_hidden_size", int)
    if read is not None:
        refuse_other_size(found.source, "target_hidden_size", read, hidden, remedy)
    if read is None or not own_embedding:
        refuse_other_size(
            found.source, "hidden_size", found.field("hidden_size", int, hidden, among=described), hidden, remedy
        )
    vocab = found.field("vocab_size", int, rows, among=described)
    if vocab not in (rows, target.vocab_size):
        refuse_other_size(found.source, "vocab_size", vocab, target.vocab_size, remedy)


def _check_lossless_settings(found: Checkpoint) -> None:
    """Refuses settings of `speculators` with which verification would be lossy. Raises ValueError."""
    settings = found.field("speculators_config", dict, {})
    where = found.folder / "config.json"
    for method in found.field("proposal_methods", list, [], among=settings):
        if not isinstance(method, dict):
            raise ValueError(f"{where}: proposal_methods has {method!r}; expected objects; correct the file")
        for name, most in (("verifier_accept_k", 1), ("accept_tolerance", 0.0)):
            if found.field(name, (int, float), most, among=method) > most:
                raise ValueError(
                    f"{where}: proposal_methods says {name}={method[name]}, which is lossy; "
                    f"expected {most}; set it so: verification here never changes the target's distribution"
                )


def _aux_hidden_states(found: Checkpoint, num_layers: int, layers: Sequence[int] | None) -> tuple[str, ...]:
    """Names of the hidden states that the head reads. Raises ValueError."""
    published = [2, num_layers // 2, num_layers - 3]
    name = "eagle_aux_hidden_state_layer_ids"
    nested = found.field(name, list, among=found.field("eagle_config", dict, {}))
    named = found.field(name, list)
    if layers is not None:
        ids = list(layers)
    elif named is not None:
        ids = named
    elif nested is not None:
        after = [index + 1 if isinstance(index, int) else index for index in nested]  # these are outputs
        ids = nested if nested == published else after
    else:
        ids = published
    if not ids or any(not isinstance(index, int) or not 0 <= index < num_layers for index in ids):
        raise ValueError(
            f"head {found.source}: it reads the inputs of layers {ids}; expected numbers from 0 to {num_layers - 1}, "
            "the target's; is this a head for this target? (drafter option layers= names others)"
        )
    return tuple(f"entering:{index}" for index in ids)


def _check_ids(found: Checkpoint, head: Eagle3Head, vocab_size: int) -> None:
    """Checks that d2t leads to ascending ids of the target and agrees with t2d. Raises ValueError."""
    ids = head.token_ids
    if ids is None:
        return
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"head {found.source}: d2t leads to ids {int(ids.min())} to {int(ids.max())}; expected ascending ids from "
            f"0 to {vocab_size - 1}"
        )
    there = found.tensors.get("t2d")
    if there is not None and not torch.equal(there.bool().nonzero().flatten(), ids):
        raise ValueError(f"head {found.source}: t2d and d2t name different ids; expected the same; download it again")

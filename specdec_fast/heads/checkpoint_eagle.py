"""Checkpoints of EAGLE heads in all public layouts, recognised by their configuration and keys.

| layout | config.json | keys |
|---|---|---|
| EAGLE-1, EAGLE-2 | of the layer; `bias` absent means true | `fc.*`, `layers.0.*`, `embed_tokens.weight` |
| EAGLE-3 as published | `draft_vocab_size` | `fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d` |
| SGLang, SpecForge, NVIDIA | the same and `eagle_config` | the same, or `layers.0.*` in place of `midlayer.*` |
| speculators | `speculators_model_type`, `transformer_layer_config` | `layers.0.*`, norms, `embed_tokens` |
| the same, of EAGLE-1 | and `layernorms`, `fusion_bias` (absent: none) | `fusion_fc.*`, `transformer.*`, norms |

Keys may begin with `model.`. EAGLE-3 heads may lack `lm_head` (the target's is used) and `fc` (they read one hidden
state). Norms and biases follow from the keys. `specdec_fast.heads.eagle_layouts` has the configurations.
Tests: tests/heads/test_checkpoint_eagle.py, test_broken_eagle.py, test_eagle3_variants.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.heads.checkpoint import Checkpoint, load_tensors, open_checkpoint, write_checkpoint
from specdec_fast.heads.eagle import EagleHead
from specdec_fast.heads.eagle3 import Eagle3Head
from specdec_fast.heads.eagle_layouts import (
    DROPPED,
    FINAL,
    LAYER_IDS,
    aux_hidden_states,
    check_features,
    check_sizes,
    flag,
    layer_config,
    layer_fields,
    rename_tensors,
)
from specdec_fast.heads.own_tables import EMBEDDING, PROJECTION, embedding_of, is_tied, projection_of, split_tables

FILE = "model.safetensors"
_HIDDEN_NORM = "layers.0.hidden_norm.weight"


def load_eagle(source: str | Path, target: Any, own_tables: bool = True) -> EagleHead:
    """Loads an EAGLE-1 or EAGLE-2 head for a target.

    Args:
        source: Folder or hub id.
        target: The target.
        own_tables: False drafts with the target's embedding and projection even where the head's differ.

    Returns:
        The head.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    found = open_checkpoint(source)
    described, tensors = layer_fields(found), rename_tensors(found)
    if "d2t" in tensors or _HIDDEN_NORM in tensors:
        raise ValueError(f"head {source}: got an EAGLE-3 head; expected an EAGLE-1 or EAGLE-2 head; use drafter eagle3")
    check_features(found, tensors)
    check_sizes(found, described, target)
    named, usual = ("fusion_bias", False) if "speculators_model_type" in found.config else ("bias", True)
    config = layer_config(found, described, tensors)
    tables = split_tables(tensors, found.source, target, config.hidden_size, own_tables)
    head = EagleHead(
        config,
        bias=found.field(named, bool, usual),
        layernorms=found.field("layernorms", bool, "embedding_layernorm.weight" in tensors),
        embed_tokens=embedding_of(tables.get(EMBEDDING)),
        lm_head=projection_of(tables.get(PROJECTION)),
    )
    load_tensors(head, tensors | tables, found.source)
    return head


def load_eagle3(
    source: str | Path, target: Any, layers: Sequence[int] | None = None, own_tables: bool = True
) -> Eagle3Head:
    """Loads an EAGLE-3 head for a target.

    Args:
        source: Folder or hub id.
        target: The target.
        layers: Layers whose inputs the head reads, in place of those in config.json.
        own_tables: False drafts with the target's embedding even where the head's differs, and with the target's
            projection if the head's covers the whole vocabulary.

    Returns:
        The head.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    found = open_checkpoint(source)
    described, tensors = layer_fields(found), rename_tensors(found)
    check_features(found, tensors)
    if _HIDDEN_NORM not in tensors:
        raise ValueError(
            f"head {source}: got no hidden_norm.weight in its first layer; EAGLE-3 heads without it are not supported; "
            "take drafter eagle for heads of EAGLE-1 and EAGLE-2, or another head"
        )
    own, d2t = tensors.pop(PROJECTION, None), tensors.pop("d2t", None)
    check_sizes(found, described, target, own_embedding=EMBEDDING in tensors)
    config = layer_config(found, described, tensors)
    tables = split_tables(tensors, found.source, target, config.hidden_size, own_tables)
    if EMBEDDING not in tables:
        check_sizes(found, described, target)
    states = aux_hidden_states(found, target, tensors, layers)
    vocab = found.field("vocab_size", int, target.vocab_size, among=described)
    columns = _count_columns(found, own, d2t, vocab, target.vocab_size)
    if columns is None:  # all ids of the target, without the padding of either
        if own is not None:
            own = split_tables({PROJECTION: own}, found.source, target, config.hidden_size, own_tables).get(PROJECTION)
        elif found.field("tie_word_embeddings", bool, False, among=described):
            own = _tied_projection(found, target, tables)
        d2t, vocab, columns = None, target.vocab_size, target.vocab_size
    if own is None and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"head {source}: got no lm_head.weight for its width of {config.hidden_size}; expected it, since the "
            f"target's projection reads {target.hidden_size} columns; download it again"
        )
    head = Eagle3Head(
        config,
        vocab_size=vocab,
        draft_vocab_size=columns,
        aux_hidden_states=states,
        target_hidden_size=target.hidden_size,
        fuses="fc.weight" in tensors,
        bias="fc.bias" in tensors,
        norm_before_residual=flag(found, "norm_before_residual"),
        norm_before_fc=flag(found, "norm_before_fc") or "input_norm.weight" in tensors,
        fc_norm=flag(found, "fc_norm") or "fc_norm.0.weight" in tensors,
        norm_output=flag(found, "norm_output"),
        embed_tokens=embedding_of(tables.get(EMBEDDING)),
        own_lm_head=own is not None,
    )
    if head.fc is None and head.hidden_size != target.hidden_size:
        raise ValueError(
            f"head {source}: missing: fc.weight; expected it in a head of width {head.hidden_size} for a target of "
            f"width {target.hidden_size}; download it again"
        )
    rest = {name: value for name, value in ((PROJECTION, own), ("d2t", d2t)) if value is not None}
    load_tensors(head, tensors | tables | rest, found.source, optional=("d2t",))
    if head.embed_tokens is not None and head.lm_head is not None and own is tables[EMBEDDING]:
        head.lm_head.weight = head.embed_tokens.weight
    _check_ids(found, head, target.vocab_size)
    return head


def _count_columns(
    found: Checkpoint, own: Tensor | None, d2t: Tensor | None, vocab: int, target_vocab: int
) -> int | None:
    """Columns of an EAGLE-3 head's logits; None for all of the target's ids. Raises ValueError for contradictions."""
    drafted = found.field("draft_vocab_size", int)
    columns = (vocab if drafted is None else drafted) if own is None else int(own.shape[0])
    if drafted is not None and drafted != columns:
        raise ValueError(
            f"{found.folder / 'config.json'}: field 'draft_vocab_size' is {drafted}, lm_head.weight has {columns} "
            "rows; expected the same; correct the file"
        )
    whole = columns == vocab or (d2t is None and columns >= target_vocab)
    if own is None and not whole:
        raise ValueError(
            f"head {found.source}: missing: lm_head.weight; expected it in a head that drafts {columns} of the "
            f"target's {vocab} ids: only heads over all ids can use the target's projection; download it again"
        )
    if d2t is None and not whole:
        raise ValueError(
            f"head {found.source}: missing: d2t; expected {columns} offsets from its {columns} columns to the {vocab} "
            "ids of the target"
        )
    if d2t is not None and (d2t.shape != (columns,) or (whole and bool(d2t.any()))):
        wanted = "zeros for a head over all ids" if whole else "one offset for each column"
        raise ValueError(
            f"head {found.source}: d2t is {list(d2t.shape)} for {columns} columns; expected {wanted}; download it again"
        )
    return None if whole else columns


def _tied_projection(found: Checkpoint, target: Any, tables: Mapping[str, Tensor]) -> Tensor | None:
    """The projection of a head that ties it to its embedding; None if the target's is the same. Raises ValueError."""
    if EMBEDDING in tables:
        return tables[EMBEDDING]
    if is_tied(target):
        return None
    raise ValueError(
        f"{found.folder / 'config.json'}: field 'tie_word_embeddings' is true, but the file has no embed_tokens.weight "
        "of its own, and the target's embedding is not its projection; expected lm_head.weight; set the field to "
        "false if the head drafts with the target's projection"
    )


def save_eagle(
    folder: Path, head: EagleHead, facts: Mapping[str, Any] | None = None, embedding: Tensor | None = None
) -> None:
    """Writes a head in the layout of published EAGLE-1 and EAGLE-2 heads.

    Args:
        folder: The folder.
        head: The head.
        facts: Further fields of config.json.
        embedding: The target's embedding [V, hidden], which published files contain too. `load_eagle` then shares it.
    """
    tensors = {key: value for key, value in head.state_dict().items() if not DROPPED.search(key)}
    if embedding is not None and head.embed_tokens is None:
        tensors[EMBEDDING] = embedding.to(head.fc.weight.dtype)
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
    final = head.aux_hidden_states == (FINAL,)
    ids = [] if final else [int(name.partition(":")[2]) for name in head.aux_hidden_states]
    # SGLang adds 1 to the numbers of `eagle_config` if the first one is 1
    nested = [index - 1 for index in ids] if ids and ids[0] <= 2 else ids
    read = head.hidden_size if head.fc is None else head.fc.in_features // len(head.aux_hidden_states)
    extra = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": read,
        **({} if final else {LAYER_IDS: ids}),
        "eagle_config": {**({} if final else {LAYER_IDS: nested}), "use_aux_hidden_state": not final},
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

"""Public layouts of Medusa heads, recognised by their keys: FasterDecoding v0.1, v1.0 and v2, and vLLM's.

| layout | file | keys |
|---|---|---|
| v0.1 | medusa_lm_head.safetensors or .pt | `{i}.{j}.linear.weight`, `.bias`, and `{i}.{layers}.weight`, a projection |
| v2 | the same | `{i}.{j}.linear.weight`, `.bias` only; the target's projection is used |
| v1.0 | a whole model, often in shards | those of v0.1 behind `medusa_head.` |
| vLLM | model.safetensors | `blocks.{i}.layers.{j}.weight`, `lm_heads.{i}.weight`; optionally behind `medusa_heads.` |

Tests: tests/heads/test_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.heads.checkpoint import (
    Checkpoint,
    load_tensors,
    open_checkpoint,
    refuse_other_size,
    write_checkpoint,
)
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.heads.own_tables import PROJECTION, split_tables
from specdec_kernels.unknown_names import unknown_name

FILE = "medusa_lm_head.safetensors"
NAMES = (FILE, "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
LAYOUTS = ("fasterdecoding", "vllm")

_PREFIX = re.compile(r"^(medusa_heads?\.)")
_OWN = re.compile(r"^(?:medusa_heads?\.)?(?:\d+\.\d+\.|blocks\.\d+\.|lm_heads?\.|token_map$)")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$|^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_PROJECTION = re.compile(r"^(\d+)\.(\d+)\.weight$|^lm_heads\.(\d+)\.weight$")


@dataclass(slots=True)
class _MedusaTensors:
    """The tensors of a checkpoint by their meaning. blocks: (head, layer, "weight" or "bias") -> tensor."""

    vllm: bool = False
    in_model: bool = False  # a whole model that contains heads
    blocks: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    projections: dict[int, Tensor] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)  # FasterDecoding: index of a projection in its list
    shared: Tensor | None = None  # vLLM: one projection for all heads
    token_map: Tensor | None = None
    unknown: list[str] = field(default_factory=list)


def load_medusa(source: str | Path, target: Any, num_heads: int | None = None) -> MedusaHeads:
    """Loads Medusa heads for a target.

    Args:
        source: Folder or hub id.
        target: The target. A projection of all heads that equals the target's is not copied.
        num_heads: Heads to load, nearest positions first. None: all; config.json must then agree with the file.
            Published v0.1 files hold 5 heads and declare 2, so there it is required.

    Returns:
        The heads, in float32.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    opened = open_checkpoint(source, names=NAMES, keep=lambda key: _OWN.match(key) is not None)
    found = _parse_keys(opened)
    heads, layers = _sizes(opened, found, num_heads)
    sample = next(iter(found.blocks.values()), None)
    if sample is None:
        sample = next(iter(found.projections.values()))
    refuse_other_size(
        opened.source,
        "hidden size",
        sample.shape[-1],
        target.hidden_size,
        "take heads that were trained for this target",
    )
    token_ids = _token_ids(opened, found, target.vocab_size)
    tensors = _stack_tensors(opened, found, heads, layers, token_ids, target)
    made = MedusaHeads(
        target.hidden_size,
        target.vocab_size,
        heads,
        num_layers=layers,
        bias="bias" in tensors,
        own_lm_head="lm_head" in tensors,
        shared_lm_head="lm_head" in tensors and len(tensors["lm_head"]) < heads,
        token_ids=None if token_ids is None else len(token_ids),
    )
    load_tensors(made, tensors, opened.source)
    return made.eval()


def _parse_keys(opened: Checkpoint) -> _MedusaTensors:
    """Sorts the tensors of a checkpoint by their keys. Raises ValueError."""
    found = _MedusaTensors()
    for name, value in opened.tensors.items():
        prefix = _PREFIX.match(name)
        key = name[prefix.end() :] if prefix else name
        found.in_model |= bool(prefix) and prefix is not None and prefix[1] == "medusa_head."
        block, projection = _BLOCK.match(key), _PROJECTION.match(key)
        if block:
            head, layer, what = (block[1], block[2], block[3]) if block[1] else (block[4], block[5], block[6])
            found.vllm |= block[1] is None
            found.blocks[int(head), int(layer), what] = value
        elif projection:
            head = projection[1] or projection[3]
            found.vllm |= projection[1] is None
            found.projections[int(head)] = value
            if projection[1]:
                found.depth[int(head)] = int(projection[2])
        elif key == "token_map":
            found.token_map = value
        elif key == "lm_head.weight":
            found.shared = value
        else:
            found.unknown.append(name)
    if found.in_model and found.projections:
        found.shared = None  # the projection of the model itself
    if found.unknown or not (found.blocks or found.projections):
        odd = (found.unknown or list(opened.tensors))[0]
        raise ValueError(
            f"head {opened.source}: key {odd!r} is of no known Medusa layout; expected '0.0.linear.weight' and so on "
            "(FasterDecoding) or 'blocks.0.layers.0.weight' and so on (vLLM)"
        )
    return found


def _sizes(opened: Checkpoint, found: _MedusaTensors, num_heads: int | None) -> tuple[int, int]:
    """Numbers of heads and layers by the keys, checked against config.json. Drops heads beyond `num_heads`."""
    heads = 1 + max([head for head, *_ in found.blocks] + list(found.projections))
    layers = 1 + max([layer for _, layer, _ in found.blocks], default=-1)
    names = ("num_heads", "num_hidden_layers") if found.vllm else ("medusa_num_heads", "medusa_num_layers")
    declared = opened.field(names[0], int)
    if num_heads is None and declared is not None and declared != heads:
        raise ValueError(
            f"{opened.folder / 'config.json'}: {names[0]} is {declared}, but the file holds {heads} heads; expected "
            f"the same number; correct {names[0]}, or choose with option num_heads={heads} (all of them)"
        )
    if num_heads is not None and not 1 <= num_heads <= heads:
        raise ValueError(
            f"head {opened.source}: got num_heads={num_heads}; expected 1 to {heads}, which the file holds"
        )
    if num_heads is not None:
        heads = num_heads
        found.blocks = {key: value for key, value in found.blocks.items() if key[0] < heads}
        found.projections = {head: value for head, value in found.projections.items() if head < heads}
        found.depth = {head: place for head, place in found.depth.items() if head < heads}
    depth = opened.field(names[1], int)
    if depth is not None and depth != layers:
        raise ValueError(
            f"{opened.folder / 'config.json'}: {names[1]} is {depth}, but the heads of the file have {layers} blocks; "
            f"expected the same number; correct {names[1]}, or download the weights again"
        )
    for head, place in found.depth.items():
        if place != layers:
            raise ValueError(
                f"head {opened.source}: key '{head}.{place}.weight' is a projection behind {place} blocks, but the "
                f"heads have {layers}; expected '{head}.{layers}.weight'"
            )
    return heads, layers


def _token_ids(opened: Checkpoint, found: _MedusaTensors, vocab_size: int) -> Tensor | None:
    """The target's ids of a reduced vocabulary, or None."""
    if found.token_map is None:
        reduced = opened.field("truncated_vocab_size", int) if found.vllm else None
        if reduced is not None and reduced < opened.field("vocab_size", int, reduced):
            raise ValueError(
                f"{opened.folder / 'config.json'}: truncated_vocab_size is {reduced}, but the file has no key "
                "'token_map', which says which tokens these are"
            )
        return None
    ids = found.token_map
    if ids.is_floating_point() or ids.dim() != 1 or not len(ids):
        raise ValueError(f"head {opened.source}: token_map is {ids.dtype} {list(ids.shape)}; expected a list of ids")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(
            f"head {opened.source}: token_map has ids from {int(ids.min())} to {int(ids.max())}; expected different "
            f"ones from 0 to {vocab_size - 1}, the target's vocabulary"
        )
    return ids.long()


def _stack_tensors(
    opened: Checkpoint, found: _MedusaTensors, heads: int, layers: int, token_ids: Tensor | None, target: Any
) -> dict[str, Tensor]:
    """The tensors of `MedusaHeads`. Raises ValueError that names all keys that are missing or have another shape."""
    places = [(head, layer) for head in range(heads) for layer in range(layers)]
    named = {
        (head, layer, what): f"blocks.{head}.layers.{layer}.{what}" if found.vllm else f"{head}.{layer}.linear.{what}"
        for head, layer in places
        for what in ("weight", "bias")
    }
    biased = any(what == "bias" for *_, what in found.blocks)
    missing = [named[key] for key in named if key not in found.blocks and (biased or key[2] == "weight")]
    projections = dict(found.projections)
    if found.shared is not None and not projections:
        projections = dict.fromkeys(range(heads), found.shared)
    elif found.vllm and opened.config.get("original_lm_head") and set(projections) == {0}:
        projections = dict.fromkeys(range(heads), projections[0])
    if projections or found.vllm:
        pattern = "lm_heads.{}.weight" if found.vllm else f"{{}}.{layers}.weight"
        missing += [pattern.format(head) for head in range(heads) if head not in projections]
    if missing:
        raise ValueError(f"head {opened.source}: missing: {', '.join(missing)}; download it again")
    tensors: dict[str, Tensor] = {}
    hidden = next(iter(found.blocks.values())).shape[-1] if found.blocks else projections[0].shape[-1]
    for key, value in found.blocks.items():
        shape = [hidden, hidden] if key[2] == "weight" else [hidden]
        if list(value.shape) != shape:
            raise ValueError(f"head {opened.source}: {named[key]} is {list(value.shape)}; expected {shape}")

    def stack(what: str) -> Tensor:
        return torch.stack(
            [torch.stack([found.blocks[head, layer, what] for head in range(heads)]) for layer in range(layers)]
        )

    tensors["weight"] = stack("weight") if layers else torch.zeros(0, heads, hidden, hidden)
    if biased:
        tensors["bias"] = stack("bias")
    if projections:
        tensors |= _stack_projections(opened, projections, found.vllm, token_ids, target)
    if token_ids is not None:
        tensors["token_ids"] = token_ids
    return tensors


def _stack_projections(
    opened: Checkpoint, projections: Mapping[int, Tensor], vllm: bool, token_ids: Tensor | None, target: Any
) -> dict[str, Tensor]:
    """The tensor `lm_head`: one projection if the heads share it, none if that is the target's. Raises ValueError."""
    cut: dict[int, Tensor] = {}
    for head, value in projections.items():
        if id(value) in cut:
            continue
        name = f"lm_heads.{head}.weight" if vllm else f"projection of head {head}"
        rows, most = target.vocab_size, max(target.num_embeddings, target.vocab_size)
        found = value
        if token_ids is not None:
            rows = most = len(token_ids)
            found = value[token_ids] if len(value) > rows else value  # vLLM reads full projections with a map like this
        if found.dim() != 2 or not rows <= len(found) <= most or found.shape[1] != target.hidden_size:
            raise ValueError(
                f"head {opened.source}: the {name} is {list(value.shape)}; expected {[rows, target.hidden_size]}, "
                "the target's vocabulary; take heads that were trained for this target"
            )
        cut[id(value)] = found[:rows]
    different = list(cut.values())
    if len(different) > 1 or token_ids is not None:
        return {"lm_head": torch.stack([cut[id(value)] for _, value in sorted(projections.items())])}
    kept = split_tables({PROJECTION: different[0]}, opened.source, target, target.hidden_size)
    return {"lm_head": kept[PROJECTION][None]} if kept else {}


def save_medusa(
    heads: MedusaHeads,
    folder: Path,
    *,
    base_model: str,
    layout: str = "fasterdecoding",
    dtype: torch.dtype = torch.bfloat16,
    lm_head: Tensor | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes heads in a public layout.

    Args:
        heads: The heads.
        folder: The folder.
        base_model: Id of the target.
        layout: "fasterdecoding" (v0.1, or v2 without own projections) or "vllm".
        dtype: Dtype of the file.
        lm_head: The target's projection [V, hidden]. Layout "vllm" requires it for heads without their own.
        facts: Further fields of config.json.

    Raises:
        ValueError: If the layout is unknown or cannot hold the heads.
    """
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))
    tensors: dict[str, Tensor] = {}
    blocks = [(layer, head) for layer in range(heads.num_layers) for head in range(heads.num_heads)]
    vllm = layout == "vllm"
    if not vllm and heads.token_ids is not None:
        raise ValueError("layout: got 'fasterdecoding' and heads with a reduced vocabulary; expected 'vllm'")
    if vllm and heads.lm_head is None and lm_head is None:
        raise ValueError("layout: got 'vllm' and heads without projections; expected lm_head, the target's own")
    for layer, head in blocks:
        stem = f"blocks.{head}.layers.{layer}." if vllm else f"{head}.{layer}.linear."
        tensors[f"{stem}weight"] = heads.weight[layer, head].to(dtype)
        if heads.bias is not None:
            tensors[f"{stem}bias"] = heads.bias[layer, head].to(dtype)
    one = lm_head if heads.lm_head is None else heads.lm_head[0] if len(heads.lm_head) < heads.num_heads else None
    if vllm and one is not None:
        tensors["lm_head.weight"] = one.to(dtype)
    elif heads.lm_head is not None:
        for head in range(heads.num_heads):
            name = f"lm_heads.{head}.weight" if vllm else f"{head}.{heads.num_layers}.weight"
            tensors[name] = (heads.lm_head[head] if one is None else one.clone()).to(dtype)
    config: dict[str, Any] = {**(facts or {})}
    if vllm:
        reduced = heads.vocab_size
        if heads.token_ids is not None:
            tensors["token_map"] = heads.token_ids
            reduced = len(heads.token_ids)
        config |= {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": heads.hidden_size,
            "vocab_size": heads.vocab_size,
            "truncated_vocab_size": reduced,
            "num_heads": heads.num_heads,
            "num_hidden_layers": heads.num_layers,
            "max_paths": 64,
            "topk": 10,
            "original_lm_head": one is not None,
            "medusa_fc_bias": heads.bias is not None,
        }
    else:
        config |= {
            "base_model_name_or_path": base_model,
            "medusa_num_heads": heads.num_heads,
            "medusa_num_layers": heads.num_layers,
        }
        if heads.lm_head is None:
            config["version"] = "2"
    write_checkpoint(folder, config, tensors, "model.safetensors" if vllm else FILE)

"""Public layouts of multi-token prediction modules. They are part of their target's checkpoint.

| layout | keys, N = num_hidden_layers |
|---|---|
| DeepSeek-V3, GLM-4.5 | `model.layers.{N}.` enorm, hnorm, eh_proj, shared_head.norm, and those of a layer |
| Qwen3-Next, Qwen3.5, Mellum | `mtp.` pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm; `mtp.layers.0.` of a layer |
| MiMo | `model.mtp_layers.0.` token_layernorm, hidden_layernorm, input_proj, final_layernorm, and those of a layer |

The module's embedding and projection are used if they differ from the target's: `embed_tokens`, and `shared_head.head`
of DeepSeek or `lm_head` of the others. Only the first of several modules is read; it drafts by repeated application.
Tests: tests/heads/test_checkpoint_mtp.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_fast.heads.checkpoint import (
    Checkpoint,
    find_folder,
    load_tensors,
    open_checkpoint,
    read_json,
    refuse_other_size,
    write_checkpoint,
)
from specdec_fast.heads.mtp import MtpHead, build_mtp_head
from specdec_fast.heads.own_tables import EMBEDDING, PROJECTION, embedding_of, projection_of, split_tables
from specdec_kernels.unknown_names import unknown_name

FILE = "model.safetensors"
LAYOUTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "deepseek": (
        "model.layers.{}.",
        "model.layers.{}.",
        {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "norm": "shared_head.norm",
            "embed_tokens": "embed_tokens",
            "lm_head": "shared_head.head",
        },
    ),
    "qwen": (
        "mtp.",
        "mtp.layers.{}.",
        {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "norm": "norm",
            "embed_tokens": "embed_tokens",
            "lm_head": "lm_head",
        },
    ),
    "mimo": (
        "model.mtp_layers.{}.",
        "model.mtp_layers.{}.",
        {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "norm": "final_layernorm",
            "embed_tokens": "embed_tokens",
            "lm_head": "lm_head",
        },
    ),
}
"""Prefix of the module's own tensors, prefix of its layer's tensors, and names of the own ones."""
_ABSENT = (
    "belongs to a module of multi-token prediction; expected a target that was published with one, as GLM-4.5, MiMo, "
    "Mellum, Qwen3-Next and Qwen3.5 were, and not DeepSeek-V3, whose latent attention mtp refuses; name a module of "
    "your own by -o head=FOLDER (examples/mtp_module.py trains one), use a trained head (eagle, eagle3, medusa, "
    "blockwise) or a drafter that needs none (ngram, suffix, recycling)"
)
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_NUMBERED = re.compile(r"^(?:model\.(?:mtp_)?|mtp\.)layers\.(\d+)\.")


def load_mtp(source: str | Path, target: Any, own_tables: bool = True) -> MtpHead:
    """Loads the first multi-token prediction module of a checkpoint for a target.

    Args:
        source: Folder or hub id.
        target: The target, usually from the same checkpoint.
        own_tables: False drafts with the target's embedding and projection even where the module's differ.

    Returns:
        The module.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    head = build_mtp_head(target)
    folder = find_folder(source)
    place = folder / "config.json"
    if place.is_file():
        _check_target(str(source), read_json(place), target)
    found = open_checkpoint(folder, keep=lambda key: _layout(key, target.num_layers) is not None, absent=_ABSENT)
    names = {name for key in found.tensors if (name := _layout(key, target.num_layers)) is not None}
    if len(names) > 1:
        raise ValueError(f"head {source}: got keys of the layouts {', '.join(sorted(names))}; expected those of one")
    layout = names.pop()
    head.hidden_first = layout == "mimo"
    first = target.num_layers if layout == "deepseek" else 0
    _check_count(found, first)
    tensors = _tensors(found, layout, first)
    tables = split_tables(tensors, str(source), target, target.hidden_size, own_tables)
    head.embed_tokens = embedding_of(tables.get(EMBEDDING))
    head.lm_head = projection_of(tables.get(PROJECTION))

    def named(key: str) -> str:
        return _layout_key(key, layout, first)

    load_tensors(head, _stack_experts(tensors, named) | tables, str(source), named=named)
    return head


def save_mtp(folder: Path, head: MtpHead, num_layers: int, *, layout: str = "deepseek") -> None:
    """Writes a module in a public layout, without its target.

    Args:
        folder: The folder.
        head: The module.
        num_layers: Layers of the target.
        layout: "deepseek", "qwen" or "mimo".

    Raises:
        ValueError: If the layout is unknown, or if it joins the module's inputs in another order.
    """
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))
    if head.hidden_first != (layout == "mimo"):
        raise ValueError(f"layout: got {layout!r} for hidden_first={head.hidden_first}; expected True for mimo alone")
    number = num_layers if layout == "deepseek" else 0
    tensors = {_layout_key(key, layout, number): value for key, value in head.state_dict().items()}
    fields = {key: value for key, value in head.config.to_dict().items() if not key.startswith("_")}
    fields |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    fields["dtype"] = str(next(head.parameters()).dtype).partition(".")[2]
    write_checkpoint(folder, fields, tensors, FILE)


def _layout_key(key: str, layout: str, number: int) -> str:
    """Key of one of our tensors in a layout, for the module with a number. Other names are unchanged."""
    own, inner, names = LAYOUTS[layout]
    part, _, rest = key.partition(".")
    if part == "layer":
        return inner.format(number) + rest
    return f"{own.format(number)}{names[part]}.{rest}" if part in names else key


def _layout(key: str, num_layers: int) -> str | None:
    """The layout that a key belongs to, or None for the target's own."""
    if key.startswith("mtp."):
        return "qwen"
    if key.startswith("model.mtp_layers."):
        return "mimo"
    number = _NUMBERED.match(key)
    return "deepseek" if number and key.startswith("model.layers.") and int(number[1]) >= num_layers else None


def _check_target(source: str, config: Mapping[str, Any], target: Any) -> None:
    """Checks sizes in config.json against the target. Raises ValueError."""
    own = target.model.config.get_text_config()
    remedy = "take the checkpoint that the target came from"
    inner = config.get("text_config")
    fields = inner if isinstance(inner, dict) else config
    for name, expected in (
        ("hidden_size", target.hidden_size),
        ("num_hidden_layers", target.num_layers),
        ("vocab_size", own.vocab_size),
    ):
        got = fields.get(name)
        if isinstance(got, int):
            refuse_other_size(source, f"{name} in config.json", got, expected, remedy)


def _check_count(found: Checkpoint, first: int) -> None:
    """Checks the number of modules in config.json against the keys. Raises ValueError."""
    there = {int(number[1]) for key in found.tensors if (number := _NUMBERED.match(key))}
    for name in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        declared = found.field(name, int)
        if declared is not None and there != set(range(first, first + declared)):
            raise ValueError(
                f"{found.folder / 'config.json'}: field {name!r} is {declared}, the file has modules at "
                f"{', '.join(map(str, sorted(there))) or 'none'}; expected {declared} from {first} on; correct "
                "the field, or download the weights again"
            )


def _tensors(found: Checkpoint, layout: str, first: int) -> dict[str, Tensor]:
    """The first module's tensors by our names."""
    own, inner, names = LAYOUTS[layout]
    ours = {f"{own.format(first)}{theirs}.": f"{name}." for name, theirs in names.items()}
    tensors: dict[str, Tensor] = {}
    for key, value in found.tensors.items():
        if "rotary_emb." in key:
            continue
        prefix = next((prefix for prefix in ours if key.startswith(prefix)), None)
        number = _NUMBERED.match(key)
        if prefix is not None:
            tensors[ours[prefix] + key[len(prefix) :]] = value
        elif key.startswith(inner.format(first)):
            tensors["layer." + key[len(inner.format(first)) :]] = value
        elif number is None or int(number[1]) == first:
            tensors[key] = value  # unknown: `load_tensors` reports it
    return tensors


def _stack_experts(tensors: dict[str, Tensor], named: Callable[[str], str]) -> dict[str, Tensor]:
    """Stacks experts as transformers does: one tensor of all experts, gate and up joined."""
    kept: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for key, value in tensors.items():
        match = _EXPERT.match(key)
        if match:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = value
        else:
            kept[key] = value
    for stem, parts in experts.items():
        count = 1 + max(number for _, number in parts)
        missing = [
            named(f"{stem}.{number}.{name}_proj.weight")
            for number in range(count)
            for name in ("gate", "up", "down")
            if (name, number) not in parts
        ]
        if missing:
            raise ValueError(f"head: missing: {', '.join(missing[:6])}; download it again")
        both = [torch.cat([parts["gate", number], parts["up", number]]) for number in range(count)]
        kept[f"{stem}.gate_up_proj"] = torch.stack(both)
        kept[f"{stem}.down_proj"] = torch.stack([parts["down", number] for number in range(count)])
    return kept

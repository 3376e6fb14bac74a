"""The layout of blockwise heads: none is public, so config.json says sizes and model.safetensors holds the module.

Tests: tests/drafters/test_blockwise.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint import fill, open_checkpoint, refuse_other_size, write_checkpoint

FILE = "model.safetensors"


def load_blockwise(source: str | Path, *, hidden_size: int, vocab_size: int) -> BlockwiseHeads:
    """The blockwise heads of a folder or hub id, for a target of these sizes, in float32.

    Raises ValueError that names the file, key or field where they are not whole or belong to another target.
    """
    opened = open_checkpoint(source, names=(FILE,))
    told = {name: opened.field(name, int) for name in ("hidden_size", "vocab_size", "num_heads", "inner_size")}
    absent = [name for name, value in told.items() if value is None]
    if absent or opened.field("model_type", str) != "blockwise":
        raise ValueError(
            f"{opened.folder / 'config.json'}: got model_type {opened.config.get('model_type')!r} without "
            f"{', '.join(absent) or 'nothing'}; expected 'blockwise' and all sizes; is this a head of another kind?"
        )
    remedy = "take heads that were trained for this target"
    refuse_other_size(opened.source, "hidden_size", told["hidden_size"], hidden_size, remedy)
    refuse_other_size(opened.source, "vocab_size", told["vocab_size"], vocab_size, remedy)
    outer = opened.tensors.get("outer.weight")
    if outer is not None and outer.shape[0] != told["num_heads"] * hidden_size:
        raise ValueError(
            f"{opened.folder / 'config.json'}: field 'num_heads' is {told['num_heads']}, but outer.weight in {FILE} "
            f"has {outer.shape[0]} rows; expected num_heads * {hidden_size}; mend the field, or download it again"
        )
    made = BlockwiseHeads(**told)
    fill(made, opened.tensors, opened.source)
    return made.eval()


def save_blockwise(
    heads: BlockwiseHeads,
    folder: Path,
    *,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write heads. base_model: the id of the target; facts: more fields of config.json."""
    sizes = {name: getattr(heads, name) for name in ("hidden_size", "vocab_size", "num_heads", "inner_size")}
    config = {**(facts or {}), "model_type": "blockwise", "base_model_name_or_path": base_model, **sizes}
    write_checkpoint(folder, config, {key: value.to(dtype) for key, value in heads.state_dict().items()}, FILE)

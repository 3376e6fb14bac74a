"""The layout of blockwise heads. No public layout exists: config.json has the sizes, model.safetensors the module.

Tests: tests/drafters/test_blockwise.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint import load_tensors, open_checkpoint, refuse_other_size, write_checkpoint

FILE = "model.safetensors"


def load_blockwise(source: str | Path, *, hidden_size: int, vocab_size: int) -> BlockwiseHeads:
    """Loads blockwise heads for a target.

    Args:
        source: Folder or hub id.
        hidden_size: Width of the target's hidden states.
        vocab_size: Vocabulary of the target.

    Returns:
        The heads, in float32.

    Raises:
        ValueError: If the checkpoint is incomplete, has another layout, or belongs to another target. The message names
            the file, key or field.
    """
    opened = open_checkpoint(source, names=(FILE,))
    fields = {name: opened.field(name, int) for name in ("hidden_size", "vocab_size", "num_heads", "inner_size")}
    absent = [name for name, value in fields.items() if value is None]
    if absent or opened.field("model_type", str) != "blockwise":
        raise ValueError(
            f"{opened.folder / 'config.json'}: got model_type {opened.config.get('model_type')!r} without "
            f"{', '.join(absent) or 'nothing'}; expected 'blockwise' and all sizes; is this a head of another kind?"
        )
    remedy = "take heads that were trained for this target"
    refuse_other_size(opened.source, "hidden_size", fields["hidden_size"], hidden_size, remedy)
    refuse_other_size(opened.source, "vocab_size", fields["vocab_size"], vocab_size, remedy)
    outer = opened.tensors.get("outer.weight")
    if outer is not None and outer.shape[0] != fields["num_heads"] * hidden_size:
        raise ValueError(
            f"{opened.folder / 'config.json'}: field 'num_heads' is {fields['num_heads']}, but outer.weight in {FILE} "
            f"has {outer.shape[0]} rows; expected num_heads * {hidden_size}; correct the field, or download it again"
        )
    made = BlockwiseHeads(**fields)
    load_tensors(made, opened.tensors, opened.source)
    return made.eval()


def save_blockwise(
    heads: BlockwiseHeads,
    folder: Path,
    *,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes heads.

    Args:
        heads: The heads.
        folder: The folder.
        base_model: Id of the target.
        dtype: Dtype of the file.
        facts: Further fields of config.json.
    """
    sizes = {name: getattr(heads, name) for name in ("hidden_size", "vocab_size", "num_heads", "inner_size")}
    config = {**(facts or {}), "model_type": "blockwise", "base_model_name_or_path": base_model, **sizes}
    write_checkpoint(folder, config, {key: value.to(dtype) for key, value in heads.state_dict().items()}, FILE)

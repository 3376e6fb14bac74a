"""The configurations of EAGLE checkpoints: what public layouts say about a head, and what of it is not supported.

There are two conventions for the hidden states that EAGLE-3 reads. At the top level of config.json (EAGLE, vLLM,
`speculators`), i is the input of layer i, and the number of layers stands for the output of the last one. In
`eagle_config` (SGLang, SpecForge, NVIDIA), i is the output of layer i if the first number is at most 1. If it is
larger, i is an input there too, as SGLang reads it.
Tests: tests/heads/test_checkpoint_eagle.py, test_broken_eagle.py, test_eagle3_variants.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdec_fast.heads.checkpoint import Checkpoint, refuse_other_size

log = logging.getLogger("specdec_fast")

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FINAL = "final_norm"
PADDING = 255
"""Rows by which a head's vocabulary may exceed the target's embedding: padding to a multiple of 256."""
DROPPED = re.compile(r"rotary_emb\.|^verifier_|^t2d$")
"""Tensors that are not needed."""
_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),  # vLLM's name, and below those of what `speculators` converts
    (re.compile(r"^embed_layernorm\."), "embedding_layernorm."),
    (re.compile(r"^hidden_layernorm\."), "layers.0.input_layernorm."),
    (re.compile(r"^lm_head_layernorm\."), "pre_lm_head_layernorm."),
)
_UNSUPPORTED_KEYS = (
    (re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\."), "latent attention (MLA)"),
    (re.compile(r"\.mlp\.(?:experts|router|gate|shared_expert\w*)\."), "a mixture of experts"),
    (re.compile(r"^(?:mask_hidden$|parallel_draft_heads\.)"), "parallel drafting (P-EAGLE)"),
)
_UNSUPPORTED_FLAGS = (
    ("use_input_layernorm_in_first_layer", False, "an embedding without a norm"),
    ("use_last_layernorm", False, "an output without a norm"),
    ("use_mtp_layernorm", True, "norms as in multi-token prediction"),
)
"""Fields of NVIDIA's `eagle_config`, values that other heads have, and their meaning."""


def rename_tensors(found: Checkpoint) -> dict[str, Tensor]:
    """Returns the tensors by our names, without those that are not needed. Raises ValueError for two of one name."""
    renamed: dict[str, Tensor] = {}
    for key, value in found.tensors.items():
        for pattern, name in _RENAMED:
            key = pattern.sub(name, key)
        if DROPPED.search(key):
            continue
        if key in renamed:
            raise ValueError(f"head {found.source}: got {key!r} under two names; expected every tensor once")
        renamed[key] = value
    return renamed


def layer_fields(found: Checkpoint) -> dict[str, Any]:
    """Returns the fields that describe the layers: config.json, or the object that `speculators` nests in it.

    Args:
        found: The checkpoint.

    Returns:
        The fields.

    Raises:
        ValueError: If the head is of another kind.
    """
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


def layer_config(found: Checkpoint, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Returns the transformers configuration of the layers.

    Args:
        found: The checkpoint.
        described: Result of `layer_fields`.
        tensors: Result of `rename_tensors`.

    Returns:
        The configuration.

    Raises:
        ValueError: If the fields cannot be read, or contradict the tensors.
    """
    from transformers import AutoConfig

    fields = {key: value for key, value in described.items() if key not in ("architectures", "transformers_version")}
    kind = str(fields.pop("model_type", None) or "llama")
    if kind == "llama" and fields.get("qkv_bias"):
        kind = "qwen2"
    if "num_hidden_layers" not in fields:
        fields["num_hidden_layers"] = 1
    count = fields["num_hidden_layers"]
    layers = {int(number[1]) for key in tensors if (number := re.match(r"layers\.(\d+)\.", key))}
    where = found.folder / "config.json"
    if layers and len(layers) != count:
        raise ValueError(
            f"{where}: field 'num_hidden_layers' is {count}, the file has {len(layers)}; expected the same; correct "
            "the file"
        )
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and isinstance(count, int) and len(kinds) > count and len(set(kinds)) == 1:
        fields["layer_types"] = kinds[:count]  # copied from the target's configuration
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:  # positions of text are equal in all sections
            kept = {key: value for key, value in rope.items() if key not in ("type", "rope_type", "mrope_section")}
            fields[name] = {**kept, "rope_type": "default"}
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # configurations fail in more ways than can be listed
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{where}: got layers that cannot be read ({reason}); correct the file") from error


def check_features(found: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Refuses heads with parts that are not supported, and names these.

    Args:
        found: The checkpoint.
        tensors: Result of `rename_tensors`.

    Raises:
        ValueError: If the head has such a part, or settings with which verification would be lossy.
    """
    for pattern, feature in _UNSUPPORTED_KEYS:
        key = next((key for key in tensors if pattern.search(key)), None)
        if key is not None:
            raise ValueError(
                f"head {found.source}: got {feature} ({key}), which heads here do not support; expected one layer of "
                "Llama, Qwen2 or Qwen3 with a dense MLP, which drafts token by token; take another head, or a drafter "
                "without one (suffix, ngram)"
            )
    nested = _eagle_config(found)
    for name, value, feature in _UNSUPPORTED_FLAGS:
        if found.field(name, bool, not value, among=nested) is value:
            raise ValueError(
                f"{found.folder / 'config.json'}: eagle_config says {name}={str(value).lower()}: got {feature}, which "
                "heads here do not support; take another head, or a drafter without one (suffix, ngram)"
            )
    _check_lossless_settings(found)


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


def flag(found: Checkpoint, name: str) -> bool:
    """Returns a boolean field of config.json or of its `eagle_config`; False if it is absent. Raises ValueError."""
    return bool(found.field(name, bool, found.field(name, bool, False, among=_eagle_config(found))))


def check_sizes(found: Checkpoint, described: Mapping[str, Any], target: Any, *, own_embedding: bool = False) -> None:
    """Checks sizes against the target.

    Args:
        found: The checkpoint.
        described: Result of `layer_fields`.
        target: The target.
        own_embedding: The head has its own embedding, so its width may differ from the target's.

    Raises:
        ValueError: If a size differs.
    """
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
    if not target.vocab_size <= vocab <= rows + PADDING:
        refuse_other_size(found.source, "vocab_size", vocab, target.vocab_size, remedy)


def aux_hidden_states(
    found: Checkpoint, target: Any, tensors: Mapping[str, Tensor], layers: Sequence[int] | None
) -> tuple[str, ...]:
    """Returns the names of the hidden states that an EAGLE-3 head reads.

    Args:
        found: The checkpoint.
        target: The target.
        tensors: Result of `rename_tensors`. The width of `fc.weight` is the number of states; without it there is one.
        layers: Layers whose inputs the head reads, in place of those in config.json.

    Returns:
        Names in the order in which `fc` reads them.

    Raises:
        ValueError: If the configuration does not name as many hidden states as `fc` reads, or if the target has no
            such layers.
    """
    fc, hidden, where = tensors.get("fc.weight"), target.hidden_size, found.folder / "config.json"
    width = hidden if fc is None else int(fc.shape[-1])
    if width % hidden:
        refuse_other_size(
            found.source, "width that fc.weight reads", width, hidden, "use a head that was trained for this target"
        )
    count, ids = width // hidden, list(layers) if layers is not None else None
    reads = f"{count} hidden state{'s' * (count > 1)}"
    if fc is not None:
        reads += f" (fc.weight has {width} columns)"
    if ids is None and not found.field("use_aux_hidden_state", bool, True, among=_eagle_config(found)):
        if count != 1:
            raise ValueError(
                f"{where}: eagle_config says use_aux_hidden_state=false, but the head reads {reads}; expected the "
                "final one alone; correct the field, or name the layers by option layers="
            )
        return (FINAL,)
    named = _named_layer_ids(found, target.num_layers) if ids is None else ids
    if fc is None and (named is None or len(named) > 1):
        raise ValueError(
            f"head {found.source}: missing: fc.weight; expected it in a head that reads several hidden states; "
            "download it again; for a head of the final state alone, set use_aux_hidden_state=false in eagle_config"
        )
    if named is None and count != 3:
        raise ValueError(
            f"{where}: got no {LAYER_IDS} for a head that reads {reads}; expected as many layers, or "
            "use_aux_hidden_state=false in eagle_config for the final state alone; add the field, or name the layers "
            "by option layers="
        )
    ids = [2, target.num_layers // 2, target.num_layers - 3] if named is None else named
    if len(ids) != count:
        raise ValueError(
            f"head {found.source}: got layers {ids}, but the head reads {reads}; expected as many numbers; correct "
            f"{LAYER_IDS} in config.json, or name the layers by option layers="
        )
    if any(not isinstance(index, int) or not 0 <= index <= target.num_layers for index in ids):
        raise ValueError(
            f"head {found.source}: it reads the inputs of layers {ids}; expected numbers from 0 to {target.num_layers} "
            f"(behind the last layer) for a target of {target.num_layers} layers; correct {LAYER_IDS} in config.json, "
            "or name the layers by option layers="
        )
    return tuple(f"entering:{index}" for index in ids)


def _named_layer_ids(found: Checkpoint, num_layers: int) -> list[Any] | None:
    """The layers that config.json names, by their inputs; None if it names none. Raises ValueError."""
    named, nested = found.field(LAYER_IDS, list), found.field(LAYER_IDS, list, among=_eagle_config(found))
    if named is not None or nested is None:
        return named
    numbers = [index for index in nested if isinstance(index, int)]
    if num_layers in numbers or min(numbers, default=2) > 1:
        log.info("head %s: the layers %s of eagle_config are read as inputs", found.source, nested)
        return list(nested)
    return [index + 1 if isinstance(index, int) else index for index in nested]


def _eagle_config(found: Checkpoint) -> dict[str, Any]:
    """The object `eagle_config` of SGLang, SpecForge and NVIDIA; empty if it is absent."""
    return dict(found.field("eagle_config", dict, {}))

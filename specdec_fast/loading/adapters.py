"""PEFT adapters: merged into models that are loaded here, or served as they are in models passed as objects.

Tests: tests/loading/test_adapters.py.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specdec_fast.extras import require
from specdec_fast.loading.error_text import first_line
from specdec_fast.targets import attention

log = logging.getLogger("specdec_fast")
_HUB_CACHE = re.compile(r"models--(?:[^/\\]+--)?([^/\\]+?)[/\\]snapshots[/\\]")
_TABLES = re.compile(r"((?:embed_tokens|lm_head)\.(?!\S*lora_embedding_B)\S*): .*?\[(\d+), (\d+)\].*?\[(\d+), (\d+)\]")
"""The sizes of an embedding or projection in an adapter and in a model, where torch finds that they differ."""
_BEYOND_LAYERS = "its PeftModel computes more than its layers (prompts, prefixes, routers, or tokens that switch it on)"
_REMEDY = "expected an adapter of layers, such as LoRA, DoRA, IA3 or OFT"


def merge_adapter(model: Any, adapter: str | Path, what: str, **files: Any) -> Any:
    """Loads an adapter and merges its weights into a model, which changes in place.

    Args:
        model: A transformers model that nobody else holds.
        adapter: Folder or hub id of the adapter.
        what: Name of the model in messages.
        **files: Arguments of from_pretrained that say where files are.

    Returns:
        The model with the merged weights.

    Raises:
        ValueError: If the adapter cannot be loaded, does not fit the model, or cannot be merged.
    """
    require("adapter", "adapter")
    from peft import PeftConfig, PeftModel

    name = str(adapter)
    with _explaining(name, "expected the folder or hub id of a PEFT adapter (adapter_config.json and weights)"):
        config = PeftConfig.from_pretrained(name, **files)
    _check_kind(config, f"adapter: got {name!r}")
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            f"adapter: got {name!r} for a model with offloaded layers, into which nothing can be merged; expected all "
            "weights in memory; change device_map, or merge the adapter on a larger machine and load the result"
        )
    fits = (
        f"expected an adapter for this model ({what}, {type(model).__name__}); the adapter names {_base(config)} as "
        "its base"
    )
    with _explaining(name, fits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing weights are an error below
        loaded = PeftModel.from_pretrained(model, name, config=config, **files)
    _check_weights(loaded, name, fits, files)
    _warn_of_other_base(config, name, what, model)
    _untie(model)
    with _explaining(name, "expected an adapter that can be merged into the model's weights"):
        return loaded.merge_and_unload(safe_merge=True).eval()


def _untie(model: Any) -> None:
    """Gives each adapted layer a weight of its own, where it shares one with other layers.

    Projections share a weight with the embedding, and repeated layers (`layer_replication`) with each other. Unmerged,
    an adapter changes the output of one of them. Merged into a shared weight, it would change all.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [each.get_base_layer() for each in model.modules() if isinstance(each, BaseTunerLayer)]
    holders = Counter(id(weight) for each in model.modules() for weight in each._parameters.values())
    for layer in adapted:
        for name, weight in layer._parameters.items():
            if weight is not None and holders[id(weight)] > 1:
                setattr(layer, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))
                holders[id(weight)] -= 1
    embedding, projection = model.get_input_embeddings(), model.get_output_embeddings()
    if projection is not None and embedding.weight is not projection.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def served_part(model: torch.nn.Module, what: str) -> Any:
    """Returns the transformers model inside a PeftModel, with the adapters in its layers; other models as they are.

    Args:
        model: A loaded model.
        what: Name of the argument in messages.

    Raises:
        ValueError: If the PeftModel computes more than its layers.
    """
    if not type(model).__module__.startswith("peft."):
        return model
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return model
    got = f"{what}: got a {type(model).__name__}"
    for config in model.peft_config.values():
        _check_kind(config, got)
    inner: Any = model.get_base_model()
    if attention.is_served(inner.config):  # by another engine, which has run the comparison below
        return inner
    sample = torch.arange(8, device=inner.device)[None]
    with torch.inference_mode(), _in_evaluation(model):
        try:
            same = torch.equal(model(input_ids=sample).logits, inner(input_ids=sample).logits)
        except Exception as error:
            raise ValueError(f"{got}, whose forward pass raised {type(error).__name__}: {first_line(error)}") from error
    if not same:
        raise ValueError(f"{got}: {_BEYOND_LAYERS}; {_REMEDY}")
    return inner


def _check_kind(config: Any, got: str) -> None:
    """Raises ValueError for an adapter that does more than change layers, or of a model for another task."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    beyond = config.is_prompt_learning or kind in ("XLORA", "POLY", "ADAPTION_PROMPT", "CPT")
    if beyond or getattr(config, "alora_invocation_tokens", None):
        raise ValueError(f"{got}, a {kind} adapter: {_BEYOND_LAYERS}; {_REMEDY}")
    task = getattr(config.task_type, "value", config.task_type)
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"{got}, an adapter for the task {task}; expected one for CAUSAL_LM; choose another adapter")


def _check_weights(loaded: Any, name: str, fits: str, files: dict[str, Any]) -> None:
    """Raises ValueError if the file has weights without a place in the model, or lacks some."""
    from peft import get_peft_model_state_dict
    from peft.utils import load_peft_weights

    with _explaining(name, fits):
        keys = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
        stored = load_peft_weights(name, device="cpu", **{key: files[key] for key in keys if key in files})
    expected = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    tables = {key for key in stored if ".embed_tokens." in key or ".lm_head." in key}
    odd, missing = sorted(stored.keys() - expected.keys() - tables), sorted(expected.keys() - stored.keys())
    if odd or missing:
        words = f"{len(odd)} of its {len(stored)} weights have no place in the model" if odd else ""
        words += (" and " if odd and missing else "") + (f"it lacks {len(missing)} weights" if missing else "")
        raise ValueError(f"adapter: got {name!r}: {words} (for example {(odd or missing)[0]}); {fits}")


def _warn_of_other_base(config: Any, name: str, what: str, model: Any) -> None:
    """Logs a warning if an adapter names another base than the model into which it is merged.

    Names are compared by their last parts, since folders are not called as hub ids are. The class of the model is
    compared too if the adapter names it.
    """
    base, mapping = config.base_model_name_or_path, getattr(config, "auto_mapping", None) or {}
    wanted = mapping.get("base_model_class")
    if base and not _may_be_same(str(base), what):
        log.warning(
            "adapter %r was trained for %r and is merged into %r, which has another name; check that both are the same "
            "model, since the weights fit either",
            name,
            base,
            what,
        )
    elif wanted not in (None, type(model).__name__):
        log.warning("adapter %r was trained for a %s and is merged into a %s", name, wanted, type(model).__name__)


def _may_be_same(base: str, model: str) -> bool:
    """Returns whether two names may stand for one model. Names of GGUF files say the quantization too."""
    paths = Path(base), Path(model)
    if all(path.exists() for path in paths) and paths[0].samefile(paths[1]):
        return True
    ours, theirs = _last_part(model), _last_part(base)
    return not (ours and theirs) or ours == theirs or (ours.endswith(".gguf") and theirs in ours)


def _last_part(name: str) -> str:
    """Returns the name of a model without the folders or the owner, in small letters; "" if it is unknown."""
    if Path(name).is_dir():
        name = str(Path(name).resolve())
    if (cached := _HUB_CACHE.search(name)) is not None:  # the last part is a commit
        return cached[1].lower()
    return re.split(r"[/\\:]", name.rstrip("/\\"))[-1].lower()


def _base(config: Any) -> str:
    return repr(config.base_model_name_or_path) if config.base_model_name_or_path else "none"


@contextmanager
def _explaining(name: str, expected: str) -> Iterator[None]:
    """Turns any error into a ValueError about the adapter."""
    try:
        yield
    except Exception as error:  # adapters fail in more ways than can be listed
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail = next((line for line in lines if line.startswith("size mismatch")), first_line(error))
        if (sizes := _TABLES.search(detail)) and sizes[3] == sizes[5]:
            raise ValueError(
                f"adapter: got {name!r}, trained with {sizes[2]} rows of {sizes[1]} (the model has "
                f"{sizes[4]}); expected as many; load the model with transformers, call "
                f"model.resize_token_embeddings({sizes[2]}), and pass PeftModel.from_pretrained(model, adapter) with "
                "the adapter's tokenizer"
            ) from error
        raise ValueError(f"adapter: got {name!r}; {expected}: {detail[:300]}") from error


@contextmanager
def _in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Runs a block with all modules in evaluation mode, and gives them their modes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

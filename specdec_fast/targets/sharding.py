"""Models whose weights transformers has sharded over processes (tensor parallelism).

Tests: tests/engine/test_tensor_parallel.py, tests/targets/test_model_support.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from specdec_fast.core.ranks import Ranks


def sharded_weights(model: Any) -> list[str]:
    """Returns the names of the weights of which this process holds a part, as far as their types tell.

    Args:
        model: A PyTorch model.
    """
    weights = chain(model.named_parameters(), model.named_buffers())
    return [name for name, weight in weights if type(weight.data).__name__ == "DTensor"]


def is_tensor_parallel(model: Any) -> bool:
    """Returns whether transformers has sharded a model by a plan for tensors, and in no other way.

    Args:
        model: A transformers model.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    others = [getattr(model, "_fsdp_size", None)]
    others += [getattr(config, name, None) for name in ("pp_size", "dp_size", "ep_size")]
    return _size(getattr(model, "_tp_size", None)) > 1 and all(_size(each) == 1 for each in others)


def find_ranks(model: Any, compile: bool = False) -> Ranks | None:
    """Returns the processes that compute a model together. None for a model that this process has whole.

    A process group alone, as programs for data parallelism have one, means nothing.

    Args:
        model: A transformers model.
        compile: Whether its passes shall be compiled.

    Raises:
        ValueError: If passes of several processes shall be compiled.
    """
    if not is_tensor_parallel(model):
        return None
    if compile:
        raise ValueError(
            f"compile: got True and a model that {model._tp_size} processes compute together, whose passes wait for "
            "each other between layers; expected compile=False; leave it out"
        )
    mesh = model._device_mesh
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return Ranks(mesh.get_group("tp") if mesh.ndim > 1 and "tp" in names else mesh.get_group())


def why_not_whole(model: Any) -> str | None:
    """Returns why an operator cannot read the weights of a model in this process, or None if it can.

    Args:
        model: A transformers model.
    """
    if not is_tensor_parallel(model):
        return None
    return f"the weights are sharded over {model._tp_size} processes, and its operators read whole weights"


def _size(number: int | None) -> int:
    """A number of processes, 1 if it is not known."""
    return number or 1

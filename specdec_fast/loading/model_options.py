"""How transformers loads a model: revision, trust, devices, and further arguments of from_pretrained.

Tests: tests/loading/test_model_options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec_fast.extras import require
from specdec_fast.loading.model_sources import check_adapter

OURS = {
    "dtype": "pass dtype=",
    "torch_dtype": "pass dtype=",
    "output_loading_info": "leave it out",
    "attn_implementation": "leave it out: the engine has an attention of its own",
    "config": "change the model that transformers has loaded, and pass it as an object",
    "state_dict": "load the model with transformers, and pass it as an object",
    "gguf_file": "name the file in place of the folder",
}
"""Argument of from_pretrained that `load` sets by itself -> what to do instead."""

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Arguments of from_pretrained that say where files are, for models and tokenizers alike."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of one model that is loaded by its name.

    Attributes:
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether Python code that comes with a checkpoint may run.
        device_map: Devices of the layers: "auto", a device, or devices by module, as transformers takes it.
        adapter: Folder or hub id of a PEFT adapter whose weights are merged into the model's.
        weights: "int8" to round the weights of linear layers, or None.
        more: Further arguments of from_pretrained.
    """

    revision: str | None = None
    trust_remote_code: bool = False
    device_map: Any = None
    adapter: str | Path | None = None
    weights: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def check(self, device: str, what: str = "model_options", *, dtype: torch.dtype | None = None) -> None:
        """Checks these options before anything is loaded.

        Args:
            device: The device that was passed beside them.
            what: Name of the argument with the further options in messages.
            dtype: The dtype that was passed beside them.

        Raises:
            ValueError: If an option is none of from_pretrained's, contradicts another one, or lacks a package.
        """
        for name in self.more:
            if not isinstance(name, str) or name in OURS:
                raise ValueError(f"{what}: got {name!r}, which `load` sets; {OURS.get(name, 'expected names')}")
        twice = [name for name in ("revision", "trust_remote_code", "device_map") if name in self.more]
        if twice and any(getattr(self, name) not in (None, False) for name in twice):
            raise ValueError(f"{what}: got {twice[0]!r} a second time; expected it once")
        if self.is_sharded:
            self._check_sharded(device, what)
        places = self._value("device_map")
        if places is not None:
            if device != "cpu":
                raise ValueError(
                    f"device_map: got {places!r} and device {device!r}; expected one of them; leave device out"
                )
            require("device-map", "device_map")
        if self.adapter is not None:
            check_adapter(self.adapter)
            require("adapter", "adapter")
        if self.weights is not None:
            self._check_weights(device, dtype)

    def _check_sharded(self, device: str, what: str) -> None:
        given = {"adapter": self.adapter, "weights": self.weights, "device_map": self._value("device_map")}
        given["device"] = None if device == "cpu" else device
        beside = [name for name, value in given.items() if value is not None]
        if beside:
            raise ValueError(
                f"{what}: got weights that are sharded over processes, and {beside[0]} {given[beside[0]]!r}; expected "
                f"one of them; leave {beside[0]} out"
            )

    def _check_weights(self, device: str, dtype: torch.dtype | None) -> None:
        if self.weights != "int8":
            raise ValueError(f"weights: got {self.weights!r}; expected 'int8', or leave weights out to keep them")
        if torch.device(device).type != "cpu":
            raise ValueError(f"weights: got 'int8' on {device}; expected device='cpu', which has a kernel for it")
        if dtype == torch.float64:
            raise ValueError("weights: got 'int8' and dtype float64; expected float32, bfloat16 or float16")

    def _value(self, name: str) -> Any:
        given = getattr(self, name)
        return self.more.get(name) if given in (None, False) else given

    @property
    def is_placed(self) -> bool:
        """Whether a device map, or a plan for several processes, says where the weights are."""
        return self._value("device_map") is not None or self.is_sharded

    @property
    def is_sharded(self) -> bool:
        """Whether each of several processes loads a part of the weights."""
        return any(self.more.get(name) is not None for name in ("tp_plan", "distributed_config"))

    def elsewhere(self) -> ModelOptions:
        """Returns what holds for files of another repository too: trust, and how the hub is reached."""
        shared = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
        more = {name: value for name, value in self.more.items() if name in shared}
        return ModelOptions(trust_remote_code=bool(self._value("trust_remote_code")), more=more)

    def for_model(self) -> dict[str, Any]:
        """Returns keyword arguments of a model's from_pretrained. Without trust, nobody is asked for it."""
        found = dict(self.more)
        found["trust_remote_code"] = bool(self._value("trust_remote_code"))
        for name in ("revision", "device_map"):
            if (value := self._value(name)) is not None:
                found[name] = value
        return found

    def for_files(self) -> dict[str, Any]:
        """Returns the keyword arguments that say where files of a configuration or a tokenizer are, and of trust."""
        found = {name: value for name, value in self.for_model().items() if name in HUB_OPTIONS}
        return found | {"trust_remote_code": bool(self._value("trust_remote_code"))}

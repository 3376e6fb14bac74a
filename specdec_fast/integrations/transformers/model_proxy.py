"""A proxy for a model, on which transformers prepares a call of `generate` and then asks for the decoding loop.

It has the model's attributes and modules, and a class derived from the model's. Only the methods that decode differ.
So transformers checks arguments, merges generation configs and builds processors and criteria as it always does.
Tests: tests/integrations/transformers/test_attachment.py.
"""

from __future__ import annotations

from typing import Any, Protocol

from specdec_fast.integrations.transformers.refusals import CACHES, OTHER_METHODS

_PREPARED_LATER = ("greedy_search", "sample")
"""Generation modes whose cache is not prepared: the engine has its own."""


class Call(Protocol):
    """One call of `generate`, which a proxy reports to."""

    def sample(self, base: type, model: Any, input_ids: Any, **prepared: Any) -> Any:
        """Decodes greedily or by sampling, from what transformers prepared."""

    def decode_otherwise(self, base: type, method: str, model: Any, *args: Any, **prepared: Any) -> Any:
        """Decodes by another method of transformers, or refuses."""

    def refuse_whole(self, reason: str) -> None:
        """Refuses the call before anything was streamed."""

    skipped_cache: tuple[Any, ...] | None
    """Arguments with which transformers would have prepared a cache."""


def proxy_class(base: type) -> type:
    """Returns the class of proxies for models of a class.

    Args:
        base: Class of the model, which has transformers' `GenerationMixin`.
    """

    def sample(self: Any, input_ids: Any, **prepared: Any) -> Any:
        return self.specdec_call.sample(base, self, input_ids, **prepared)

    def other(method: str) -> Any:
        def decode(self: Any, *args: Any, **prepared: Any) -> Any:
            return self.specdec_call.decode_otherwise(base, method, self, *args, **prepared)

        return decode

    def prepare_cache(self: Any, config: Any, model_kwargs: Any, mode: Any, *sizes: Any, **more: Any) -> Any:
        given = any(model_kwargs.get(name) is not None for name in CACHES)
        if str(getattr(mode, "value", mode)) in _PREPARED_LATER and not given and not more:
            self.specdec_call.skipped_cache = (config, mode, *sizes)
            return None
        return base._prepare_cache_for_generation(self, config, model_kwargs, mode, *sizes, **more)  # type: ignore[attr-defined]

    def deprecated_repository(self: Any, mode: Any, *args: Any, **more: Any) -> Any:
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        if "/" in GENERATION_MODES_MAPPING.get(mode, ""):
            self.specdec_call.refuse_whole(f"{mode.value}; expected greedy decoding or sampling")
        return base._get_deprecated_gen_repo(self, mode, *args, **more)  # type: ignore[attr-defined]

    methods: dict[str, Any] = {method: other(method) for method in OTHER_METHODS if hasattr(base, method)}
    if hasattr(base, "_get_deprecated_gen_repo"):
        methods["_get_deprecated_gen_repo"] = deprecated_repository
    methods |= {"_sample": sample, "_prepare_cache_for_generation": prepare_cache, "__slots__": ("specdec_call",)}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}  # for messages of transformers
    return type(base.__name__, (base,), {**methods, **names})


def make_proxy(kind: type, model: Any, call: Call) -> Any:
    """Returns a proxy that shares all attributes of a model.

    Args:
        kind: A class of `proxy_class`.
        model: The model.
        call: The call of `generate` that the proxy serves.
    """
    found: Any = object.__new__(kind)
    object.__setattr__(found, "__dict__", vars(model))
    object.__setattr__(found, "specdec_call", call)
    return found

"""How an engine and its target work, in words. Tests: tests/engine/test_explanation.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from specdec_fast.engine.cuda_graph.eligibility import CaptureFailures, request_ineligible_reasons
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.lockstep import Lockstep
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import Drafter, Rule, Target


class ExplanationMethods(ABC):
    """Methods of an engine that say how it works. `Engine` derives from it."""

    target: Target
    drafter: Drafter | None
    rule: Rule
    why_rule: str
    why_drafter: str | None
    _drafter_runner: DrafterRunner
    _lockstep: Lockstep
    _prefixes: PrefixSharing
    _failures: CaptureFailures
    _graph_ineligible_reasons: list[str]

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Number of running requests."""

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """Number of queued requests."""

    @abstractmethod
    def _ready(self) -> dict[int, Handle]:
        """The running requests that can decode, by row."""

    def why_not_graph(self) -> list[str]:
        """Returns why steps do not run as CUDA graphs, one sentence per reason; empty if they do."""
        if self._graph_ineligible_reasons or self._failures.reason is None:
            return self._graph_ineligible_reasons or request_ineligible_reasons(self._ready().values())
        return [self._failures.reason, *request_ineligible_reasons(self._ready().values())]

    @property
    def step_mode(self) -> str:
        """How the next step runs: "graph" or "sync". `why_not_graph` has the reasons."""
        return "sync" if self.why_not_graph() else "graph"

    def __repr__(self) -> str:
        parts = f"rule {self.rule.name}, drafter {getattr(self.drafter, 'name', 'none')}, {explain_passes(self.target)}"
        return f"Engine({parts}; {self.num_running} running, {self.num_queued} queued)"

    def explain_drafter(self) -> str:
        """Returns the drafter, or none, with the budget unless it is fixed, and why it proposes if it was not named."""
        name = explain_budget(getattr(self.drafter, "name", "none"), self._drafter_runner.budget)
        return name if self.why_drafter is None else f"{name}: {self.why_drafter}"

    def explain(self) -> str:
        """Returns, in words, which rule verifies, which drafter proposes, and how passes and steps run."""
        before = f" ({self._failures.last}, but not since)" if self._failures.last else ""
        reasons = "; ".join(self.why_not_graph()) or f"the host reads one step behind{before}"
        ranks = self._lockstep.ranks
        place = "" if ranks is None else f", in process {ranks.rank} of {ranks.size} that hold parts of the weights"
        lines = [
            f"rule {self.rule.name}: {self.why_rule}",
            f"drafter {self.explain_drafter()}",
            f"passes {explain_passes(self.target)}{place}",
            f"steps {self.step_mode}: {reasons}",
            f"prefix sharing {self._prefixes.explain()}",
        ]
        return "\n".join(lines)


def is_fused(target: Target) -> bool | None:
    """Returns whether passes run as one operator. None if the target does not say."""
    return target.why_not_fused is None if hasattr(target, "why_not_fused") else None


def weight_storage(model: Any) -> str:
    """Returns how quantized linear layers store their weights, such as "int8"; "" if none is quantized.

    Args:
        model: A PyTorch model, or None.
    """
    found: dict[str, None] = {}
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        size = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
        tensors = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        if size and tensors and (name := _quantized_dtype(max(tensors, key=_stored_bytes), size)):
            found[name] = None
    return " and ".join(found)


def _quantized_dtype(weight: Any, size: int) -> str:
    """Returns the type of a quantized weight with `size` elements; "" for one that is not quantized."""
    if (kind := getattr(weight, "quant_type", None)) is not None:  # nf4 or fp4 of bitsandbytes
        return str(kind)
    if (dtype := getattr(weight, "target_dtype", None)) is not None:  # torchao's, stored in more bits
        return str(dtype).removeprefix("torch.")
    stored = max(_inner(weight), key=_stored_bytes)
    if stored.dtype.is_floating_point:
        return str(stored.dtype).removeprefix("torch.") if stored.dtype.itemsize == 1 else ""
    return f"int{round(8 * stored.nbytes / size)}"


def _inner(weight: Any) -> list[torch.Tensor]:
    """Returns the plain tensors of which a subclass of tensors consists."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    return [each for part in parts if isinstance(part, torch.Tensor) for each in _inner(part)]


def _stored_bytes(weight: Any) -> int:
    return sum(each.nbytes for each in _inner(weight))


def explain_budget(drafter: str, budget: Any) -> str:
    """Returns the name of a drafter with that of its budget, unless this is fixed or there is no drafter."""
    name = getattr(budget, "name", type(budget).__name__)
    return drafter if drafter == "none" or name == "fixed" else f"{drafter} with budget {name}"


def explain_passes(target: Target) -> str:
    """Returns the dtype and device of a target's passes, and whether they are fused, with the reason.

    Of quantized weights it says how they are stored too.
    """
    model: Any = getattr(target, "model", None)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if stored := weight_storage(model):
        dtype = f"{stored} weights, {dtype} computation"
    place = " on ".join(filter(None, (dtype, str(getattr(target, "device", "")))))
    fused, reason = is_fused(target), getattr(target, "why_not_fused", None)
    return place if fused is None else f"{place}, fused" if fused else f"{place}, not fused: {reason}"

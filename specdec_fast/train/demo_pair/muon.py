"""Muon for hidden matrices and AdamW for all other parameters, as one optimiser for small models on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5, bfloat16: bool = False) -> Tensor:
    """Computes the nearest semi-orthogonal matrices by a batched Newton-Schulz iteration.

    torch.optim.Muon does the same for one matrix at a time, in bfloat16 only.

    Args:
        stack: Matrices, [n, rows, columns].
        steps: Iterations.
        bfloat16: Compute in bfloat16 instead of float32.

    Returns:
        Matrices with the shape and dtype of `stack`.

    Source:
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    a, b, c = _QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if tall else stack
    x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    x = x.to(torch.bfloat16) if bfloat16 else x
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(stack.dtype)


class MuonWithAdamW(torch.optim.Optimizer):
    """Applies Muon to the matrices of layers, and AdamW to embeddings, heads and norms.

    Matrices of one shape are orthogonalised together.

    Args:
        named: Names and parameters. A 2-D parameter with ".layers." in its name is a layer's matrix.
        muon_lr: Peak learning rate of Muon.
        adam_lr: Peak learning rate of AdamW.
        momentum: Momentum of Muon.
        betas: Betas of AdamW.
        bfloat16: Orthogonalise in bfloat16.

    Attributes:
        scale: Factor on both learning rates, set by the schedule.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        bfloat16: bool = False,
    ) -> None:
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in named:
            (matrices if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
        groups = [
            {"params": matrices, "kind": "muon", "peak": muon_lr},
            {"params": rest, "kind": "adam", "peak": adam_lr},
        ]
        defaults = {"momentum": momentum, "betas": betas, "eps": 1e-8}
        super().__init__([g for g in groups if g["params"]], defaults)
        self.scale = 1.0
        self.bfloat16 = bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            (self._muon if group["kind"] == "muon" else self._adam)(group, group["peak"] * self.scale)

    def _muon(self, group: dict[str, Any], lr: float) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[tuple(p.shape)].append(p)
        for shape, parameters in by_shape.items():
            updates = []
            for p in parameters:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                assert p.grad is not None
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(state["momentum"], group["momentum"]))
            stack = orthogonalise(torch.stack(updates), bfloat16=self.bfloat16)
            factor = max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(parameters, stack, strict=True):
                p.add_(update, alpha=-lr * factor)

    def _adam(self, group: dict[str, Any], lr: float) -> None:
        first, second = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if "count" not in state:
                state.update(count=torch.zeros(()), mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["count"] += 1
            state["mean"].lerp_(p.grad, 1 - first)
            state["square"].lerp_(p.grad.square(), 1 - second)
            n = float(state["count"])
            root = (state["square"] / (1 - second**n)).sqrt_().add_(group["eps"])
            p.addcdiv_(state["mean"], root, value=-lr / (1 - first**n))

"""`WeightChanges` notices every way in which weights are usually changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_fast.targets.weight_changes import WeightChanges


def model() -> Any:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
    made[1].weight.data = made[1].weight.data.t().contiguous().t()  # as targets store them on a CPU
    return made.register_buffer("table", torch.arange(3.0)) or made


def step(made: Any) -> None:
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(torch.arange(7)).square().sum().backward()
    optimizer.step()


def in_place(made: Any) -> None:
    with torch.no_grad():
        made[2].bias.add_(1.0)


def in_inference_mode(made: Any) -> None:
    with torch.inference_mode():
        made[2].bias.add_(1.0)


def buffers(made: Any) -> None:
    made.table.zero_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "optimizer": step,
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "through data": lambda made: made[1].weight.data.mul_(1.001),
    "vector through data": lambda made: made[2].weight.data.mul_(1.001),
    "new memory": lambda made: setattr(made[0].weight, "data", made[0].weight.data.clone()),
    "loaded": lambda made: made.load_state_dict(made.state_dict()),
    "buffers": buffers,
    "dtype": lambda made: made.to(torch.float64),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_seen_once(how: str) -> None:
    made = model()
    changed = WeightChanges(made)
    assert [changed(), changed()] == [False, False]
    CHANGES[how](made)
    assert [changed(), changed()] == [True, False]


def test_passes_and_gradients_are_no_changes() -> None:
    made = model()
    changed = WeightChanges(made)
    changed()
    made(torch.arange(7)).sum().backward()
    assert not changed()


def test_numbers_that_are_not_numbers_equal_themselves() -> None:
    made = model()
    made[0].weight.data.fill_(float("nan"))
    changed = WeightChanges(made)
    assert [changed(), changed()] == [False, False]


def test_weights_without_memory_are_passed_over() -> None:
    made = torch.nn.Sequential(
        torch.nn.Linear(3, 3, device="meta"), torch.nn.ParameterList([torch.empty(0)]), torch.nn.Linear(3, 3)
    )
    made[2].weight = torch.nn.Parameter(torch.zeros(3, 3).to_sparse(), requires_grad=False)
    with torch.inference_mode():
        made[2].bias = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    changed = WeightChanges(made)
    assert [changed(), changed()] == [False, False]
    made[2].bias.data.add_(1.0)
    assert changed()


def test_a_copy_looks_at_its_own_weights() -> None:
    changed = WeightChanges(model())
    changed()
    other = copy.deepcopy(changed)
    assert [other(), other()] == [False, False]
    other._model[1].weight.data.mul_(2.0)
    assert other() and not changed()

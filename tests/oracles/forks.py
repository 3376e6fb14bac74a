"""Forks of the test process, which need no imports."""

from __future__ import annotations

import multiprocessing

import torch


def _backward() -> None:
    torch.ones(2, requires_grad=True).sum().backward()


def can_train() -> bool:
    """Whether autograd works in a fork of this process. It does not after autograd made threads for a device."""
    child = multiprocessing.get_context("fork").Process(target=_backward)
    child.start()
    child.join()
    return child.exitcode == 0

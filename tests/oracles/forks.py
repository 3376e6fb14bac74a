"""Forks of a process of tests, which need not import anything."""

from __future__ import annotations

import multiprocessing

import torch


def _backward() -> None:
    torch.ones(2, requires_grad=True).sum().backward()


def can_train() -> bool:
    """Whether autograd works in a fork of this process: once it made threads for a device, it does not."""
    child = multiprocessing.get_context("fork").Process(target=_backward)
    child.start()
    child.join()
    return child.exitcode == 0

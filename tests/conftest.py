"""Shared by all tests: the oracles on the path, one thread (small tensors run faster so) and fixed seeds."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script; what is tested heeds that, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # so that every test folder can `import oracles`

import pytest  # noqa: E402

if TYPE_CHECKING:
    import torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how to get packages that tests lack, as after `make demo`, whose environment has no test packages."""
    errors = "\n".join(str(report.longrepr) for report in terminalreporter.stats.get("error", []))
    wanted = sorted(set(re.findall(r"ModuleNotFoundError: No module named '(\w+)", errors)))
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        terminalreporter.write_line(
            f"{', '.join(missing)}: not installed; `make environment` installs all packages of the tests into .venv"
        )


def pytest_collection_finish() -> None:
    """Takes what is there for good, all modules and tests, out of the garbage collector's sight: each full collection
    would walk over it again, a twelfth of the time of all tests.
    """
    gc.collect()
    gc.freeze()


SEED = 20_260_101  # (torch is imported where it is used: the process that only hands out the tests does without)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests of several threads raise the number themselves and put it back."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same state of the stateful generators, alone or among others."""
    import torch

    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # (torch.manual_seed notes down its caller for every kind of device)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator for test data."""
    import torch

    return torch.Generator().manual_seed(SEED)


@pytest.fixture(autouse=True)
def faults(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """What was logged of drafters and budgets that raised. The engine goes on without them, so a test would not notice:
    one that does not name this fixture fails.
    """
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR and record.getMessage().startswith(("drafter", "budget")):
                found.append(record.getMessage())

    listener = Listener()
    logger = logging.getLogger("specdec_fast")
    logger.addHandler(listener)
    yield found
    logger.removeHandler(listener)
    assert not found or "faults" in inspect.signature(request.function).parameters, found

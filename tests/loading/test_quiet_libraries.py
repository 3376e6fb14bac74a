"""A program prints nothing of the libraries that it loads models with."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from specdec_fast.loading import engine_builder

CODE = """
from specdec_fast.loading.quiet_libraries import quiet_libraries

quiet_libraries()
import accelerate
from transformers.utils import logging
assert not logging.is_progress_bar_enabled()
accelerate.Accelerator()
"""


def test_loading_silences_imports_but_no_level_that_a_program_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports torchao when it first loads a model, and that warns about other machines."""
    noisy, chosen = logging.getLogger("torch.utils._pytree"), logging.getLogger("torchao")
    monkeypatch.setattr(noisy, "level", logging.NOTSET)
    monkeypatch.setattr(chosen, "level", logging.INFO)
    seen: list[int] = []

    def check(device: Any) -> None:
        seen.extend((noisy.level, chosen.level))
        raise ValueError

    monkeypatch.setattr(engine_builder, "check_device", check)
    with pytest.raises(ValueError):
        engine_builder.load("demo-target")
    assert seen == [logging.ERROR, logging.INFO] and (noisy.level, chosen.level) == (logging.NOTSET, logging.INFO)


def test_nothing_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not any(name in done.stderr for name in ("torchao", "pytree", "Loading"))

"""A program prints nothing of the libraries that it loads models with."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from specdec_fast.loading.quiet_libraries import quiet_libraries

quiet_libraries()
import accelerate
from transformers.utils import logging
assert not logging.is_progress_bar_enabled()
accelerate.Accelerator()
"""


def test_nothing_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not any(name in done.stderr for name in ("torchao", "pytree", "Loading"))

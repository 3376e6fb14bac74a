"""Silence for libraries that programs load models with: no progress bars, no warnings about other machines.

Tests: tests/loading/test_quiet_libraries.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn on import, such as torchao about kernels for other machines."""


@contextmanager
def without_import_warnings() -> Iterator[None]:
    """Silences warnings of libraries that transformers imports in a block. Levels that a program has set stay."""
    ours = [logger for logger in map(logging.getLogger, _NOISY) if logger.level == logging.NOTSET]
    for logger in ours:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger in ours:
            logger.setLevel(logging.NOTSET)


def quiet_libraries() -> None:
    """Silences transformers, huggingface_hub and torchao, for programs with messages of their own."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()

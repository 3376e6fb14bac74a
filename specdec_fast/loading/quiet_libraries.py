"""Silence for libraries that programs load models with: no progress bars, no warnings about other machines.

Tests: tests/loading/test_quiet_libraries.py.
"""

from __future__ import annotations

import logging

_NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn on import, such as torchao about kernels for other machines."""


def quiet_libraries() -> None:
    """Silences transformers, huggingface_hub and torchao, for programs with messages of their own."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()

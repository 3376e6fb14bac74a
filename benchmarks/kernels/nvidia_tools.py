"""Whether NVIDIA's tools can look at kernels here."""

from __future__ import annotations

import os
import shutil

REHEARSAL = "SPECDEC_REHEARSAL"
"""Variable that is set while a simulated GPU is in place."""


def missing(tool: str) -> str | None:
    """Why a tool cannot look at kernels here, or None."""
    if REHEARSAL in os.environ:
        return "a simulated GPU runs no kernels"
    return None if shutil.which(tool) else f"{tool} is not installed"
